import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.Set;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;

/** A session of Apache Kafka's Java clients: Session HOST:PORT. */
public final class Session {
    private static final String BYTES = "org.apache.kafka.common.serialization.";
    private static String brokers;

    public static void main(String[] args) throws Exception {
        brokers = args[0];
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", brokers, "client.id", "admin"))) {
            create(admin);
            produce("orders", 120, "shop", "all", Map.of("linger.ms", "5"));
            produce("payments", 60, "pay", "1",
                    Map.of("enable.idempotence", "false", "compression.type", "lz4"));
            produce("audit", 40, "audit", "all", Map.of("compression.type", "zstd"));
            produce("audit", 10, "careless", "0", Map.of("enable.idempotence", "false"));
            produce("events", 30, "auto", "all", Map.of("compression.type", "gzip"));
            group();
            transactions();
            ask(admin);
        }
    }

    private static void create(Admin admin) throws Exception {
        admin.createTopics(List.of(
                new NewTopic("orders", 3, (short) 1).configs(Map.of("retention.ms", "7200000000")),
                new NewTopic("payments", 2, (short) 1),
                new NewTopic("audit", 1, (short) 1).configs(Map.of("cleanup.policy", "compact")),
                new NewTopic("short-lived", Optional.empty(), Optional.empty()))).all().get();
        admin.createPartitions(Map.of("audit", NewPartitions.increaseTo(2))).all().get();
        ConfigResource orders = new ConfigResource(ConfigResource.Type.TOPIC, "orders");
        ConfigResource broker = new ConfigResource(ConfigResource.Type.BROKER, "1");
        admin.describeConfigs(List.of(orders, broker)).all().get();
        admin.incrementalAlterConfigs(Map.of(orders, List.of(new AlterConfigOp(
                new ConfigEntry("max.message.bytes", "200000"), AlterConfigOp.OpType.SET))))
                .all().get();
        admin.describeConfigs(List.of(orders)).all().get();
        admin.deleteTopics(List.of("short-lived")).all().get();
        admin.listTopics().names().get();
        admin.describeCluster().nodes().get();
    }

    private static Properties client(String clientId, Map<String, String> more) {
        Properties config = new Properties();
        config.put("bootstrap.servers", brokers);
        config.put("client.id", clientId);
        for (String side : List.of("key.", "value.")) {
            config.put(side + "serializer", BYTES + "StringSerializer");
            config.put(side + "deserializer", BYTES + "StringDeserializer");
        }
        config.putAll(more);
        return config;
    }

    private static void produce(String topic, int count, String clientId, String acks,
            Map<String, String> more) throws Exception {
        Map<String, String> config = new HashMap<>(more);
        config.put("acks", acks);
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(client(clientId, config))) {
            for (int n = 0; n < count; n++) {
                ProducerRecord<String, String> record = new ProducerRecord<>(
                        topic, "key-" + n % 17, (topic + " " + n + " ").repeat(1 + n % 7));
                record.headers().add("number", String.valueOf(n).getBytes());
                producer.send(record);
                if (n % 20 == 19) {
                    producer.flush();
                }
            }
        }
    }

    private static KafkaConsumer<String, String> consumer(String clientId, Map<String, String> more) {
        Map<String, String> config = new HashMap<>(Map.of(
                "auto.offset.reset", "earliest", "enable.auto.commit", "false",
                "session.timeout.ms", "10000", "heartbeat.interval.ms", "500",
                "fetch.max.wait.ms", "100"));
        config.putAll(more);
        return new KafkaConsumer<>(client(clientId, config));
    }

    /** A member, a second one that joins, and the first one leaves: two rebalances. */
    private static void group() throws Exception {
        Map<String, String> group = Map.of("group.id", "billing");
        List<String> topics = List.of("orders", "payments");
        KafkaConsumer<String, String> one = consumer("member-1", group);
        one.subscribe(topics);
        int seen = 0;
        while (seen < 20 || one.assignment().size() < 5) {
            seen += one.poll(Duration.ofMillis(100)).count();
        }
        one.commitSync();
        KafkaConsumer<String, String> two = consumer("member-2", group);
        two.subscribe(topics);
        Thread other = new Thread(() -> {
            while (two.assignment().isEmpty()) {
                two.poll(Duration.ofMillis(100));
            }
        });
        other.start();
        while (other.isAlive() || one.assignment().size() == 5) {
            one.poll(Duration.ofMillis(100));
        }
        one.commitSync();
        one.close();
        seen = 0;
        long end = System.currentTimeMillis() + 10_000;
        while (two.assignment().size() < 5 && System.currentTimeMillis() < end) {
            two.poll(Duration.ofMillis(100));
        }
        two.seekToBeginning(two.assignment());
        while (seen < 180 && System.currentTimeMillis() < end) {
            seen += two.poll(Duration.ofMillis(100)).count();
        }
        two.commitSync();
        two.close();
    }

    /** Committed with offsets of a group, committed, aborted; and a reader of what was committed. */
    private static void transactions() throws Exception {
        TopicPartition source = new TopicPartition("orders", 0);
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(
                        client("ledger", Map.of("transactional.id", "ledger-1")));
                KafkaConsumer<String, String> reader = consumer(
                        "copier", Map.of("group.id", "copiers", "isolation.level", "read_committed"))) {
            producer.initTransactions();
            reader.assign(Set.of(source));
            for (int round = 0; round < 3; round++) {
                producer.beginTransaction();
                for (int n = 0; n < 15; n++) {
                    producer.send(new ProducerRecord<>("payments", "tx", "tx " + round + " " + n));
                    producer.send(new ProducerRecord<>("orders", "tx", "tx " + round + " " + n));
                }
                producer.flush();
                if (round == 0) {
                    while (reader.poll(Duration.ofMillis(100)).isEmpty()) {
                        Thread.sleep(10);
                    }
                    producer.sendOffsetsToTransaction(
                            Map.of(source, new OffsetAndMetadata(5, "copied")), reader.groupMetadata());
                }
                if (round == 1) {
                    producer.abortTransaction();
                } else {
                    producer.commitTransaction();
                }
            }
            Map<TopicPartition, Long> ends = reader.endOffsets(Set.of(source));
            reader.seekToBeginning(Set.of(source));
            List<ConsumerRecord<String, String>> read = new ArrayList<>();
            while (reader.position(source) < ends.get(source)) {
                reader.poll(Duration.ofMillis(100)).forEach(read::add);
            }
        }
    }

    private static void ask(Admin admin) throws Exception {
        TopicPartition place = new TopicPartition("orders", 0);
        admin.listConsumerGroups().all().get();
        admin.describeConsumerGroups(List.of("billing")).all().get();
        admin.listConsumerGroupOffsets("billing").partitionsToOffsetAndMetadata().get();
        admin.listTransactions().all().get();
        admin.describeTransactions(List.of("ledger-1")).all().get();
        admin.listOffsets(Map.of(place, OffsetSpec.latest())).all().get();
        admin.deleteRecords(Map.of(place, RecordsToDelete.beforeOffset(3))).all().get();
        admin.listOffsets(Map.of(place, OffsetSpec.earliest())).all().get();
        admin.describeTopics(List.of("orders", "events")).allTopicNames().get();
        admin.describeLogDirs(List.of(1)).allDescriptions().get();
        admin.deleteConsumerGroups(List.of("copiers")).all().get();
    }
}
