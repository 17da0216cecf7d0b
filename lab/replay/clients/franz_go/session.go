// A session of franz-go: session HOST:PORT
package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

var brokers string

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func client(name string, more ...kgo.Opt) *kgo.Client {
	opts := append([]kgo.Opt{kgo.SeedBrokers(brokers), kgo.ClientID(name)}, more...)
	one, err := kgo.NewClient(opts...)
	check(err)
	return one
}

func produce(ctx context.Context, one *kgo.Client, topic string, count int) {
	for n := 0; n < count; n++ {
		one.Produce(ctx, &kgo.Record{
			Topic: topic, Key: []byte(fmt.Sprintf("key-%d", n%17)),
			Value:   []byte(strings.Repeat(fmt.Sprintf("%s %d ", topic, n), 1+n%7)),
			Headers: []kgo.RecordHeader{{Key: "number", Value: []byte(fmt.Sprint(n))}},
		}, func(_ *kgo.Record, err error) { check(err) })
		if n%25 == 24 {
			check(one.Flush(ctx))
		}
	}
	check(one.Flush(ctx))
}

func member(name string, assigned chan<- int) *kgo.Client {
	return client(name, kgo.ConsumerGroup("billing"), kgo.ConsumeTopics("orders", "payments"),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.DisableAutoCommit(), kgo.FetchMaxWait(100*time.Millisecond),
		kgo.Balancers(kgo.RangeBalancer()), kgo.HeartbeatInterval(500*time.Millisecond),
		kgo.SessionTimeout(10*time.Second),
		kgo.OnPartitionsAssigned(func(_ context.Context, _ *kgo.Client, got map[string][]int32) {
			count := 0
			for _, numbers := range got {
				count += len(numbers)
			}
			assigned <- count
		}))
}

func poll(ctx context.Context, one *kgo.Client, least int) {
	for seen := 0; seen < least; {
		seen += one.PollFetches(ctx).NumRecords()
	}
	check(one.CommitUncommittedOffsets(ctx))
}

func group(ctx context.Context) {
	first, second := make(chan int, 100), make(chan int, 100)
	one := member("member-1", first)
	poll(ctx, one, 20)
	two := member("member-2", second)
	for <-second == 0 {
	}
	check(one.CommitUncommittedOffsets(ctx))
	one.LeaveGroup()
	one.Close()
	for <-second < 5 {
	}
	two.CommitUncommittedOffsets(ctx)
	two.LeaveGroup()
	two.Close()
}

func transactions(ctx context.Context) {
	ledger, err := kgo.NewGroupTransactSession(kgo.SeedBrokers(brokers), kgo.ClientID("ledger"),
		kgo.TransactionalID("ledger-1"), kgo.ConsumerGroup("copiers"), kgo.ConsumeTopics("orders"),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchMaxWait(100*time.Millisecond), kgo.RequireStableFetchOffsets())
	check(err)
	for n := 0; n < 3; n++ {
		if n == 0 {
			ledger.PollFetches(ctx)
		}
		check(ledger.Begin())
		produce(ctx, ledger.Client(), "payments", 15)
		_, err := ledger.End(ctx, kgo.TransactionEndTry(n != 1))
		check(err)
	}
	ledger.Close()
}

func main() {
	brokers = os.Args[1]
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	base := client("admin")
	admin := kadm.NewClient(base)
	retention := "7200000000"
	_, err := admin.CreateTopics(ctx, 3, 1, map[string]*string{"retention.ms": &retention}, "orders")
	check(err)
	_, err = admin.CreateTopics(ctx, 2, 1, nil, "payments", "short-lived")
	check(err)
	_, err = admin.DescribeTopicConfigs(ctx, "orders")
	check(err)
	size := "200000"
	_, err = admin.AlterTopicConfigs(ctx, []kadm.AlterConfig{{Name: "max.message.bytes", Value: &size}}, "orders")
	check(err)
	_, err = admin.DeleteTopics(ctx, "short-lived")
	check(err)
	shop := client("shop", kgo.RecordPartitioner(kgo.StickyKeyPartitioner(nil)))
	produce(ctx, shop, "orders", 120)
	shop.Close()
	pay := client("pay", kgo.RequiredAcks(kgo.LeaderAck()), kgo.DisableIdempotentWrite(),
		kgo.ProducerBatchCompression(kgo.Lz4Compression()))
	produce(ctx, pay, "payments", 60)
	pay.Close()
	auto := client("auto", kgo.AllowAutoTopicCreation())
	produce(ctx, auto, "events", 30)
	auto.Close()
	group(ctx)
	transactions(ctx)
	_, err = admin.ListGroups(ctx)
	check(err)
	_, err = admin.DescribeGroups(ctx, "billing")
	check(err)
	_, err = admin.FetchOffsets(ctx, "billing")
	check(err)
	_, err = admin.ListEndOffsets(ctx, "orders", "payments")
	check(err)
	_, err = admin.DescribeTransactions(ctx, "ledger-1")
	check(err)
	_, err = admin.DeleteGroups(ctx, "copiers")
	check(err)
	admin.Close()
}
