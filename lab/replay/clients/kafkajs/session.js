// A session of KafkaJS: node session.js HOST:PORT
const { Kafka, logLevel } = require("kafkajs");
const kafka = new Kafka({ clientId: "js", brokers: [process.argv[2]], logLevel: logLevel.NOTHING });

function records(topic, count) {
  return Array.from({ length: count }, (_, n) => ({
    key: `key-${n % 17}`, value: `${topic} ${n} `.repeat(1 + (n % 7)), headers: { number: `${n}` },
  }));
}

async function until(isDone) {
  const end = Date.now() + 20000;
  while (!isDone()) {
    if (Date.now() > end) throw new Error("the session did not get as far as it should");
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

async function member(counts, name) {
  const one = kafka.consumer({
    groupId: "billing", heartbeatInterval: 500, sessionTimeout: 10000, rebalanceTimeout: 5000, maxWaitTimeInMs: 100,
  });
  counts[name] = { seen: 0, partitions: 0 };
  one.on(one.events.GROUP_JOIN, (event) => {
    counts[name].partitions = Object.values(event.payload.memberAssignment).flat().length;
  });
  await one.connect();
  await one.subscribe({ topics: ["orders", "payments"], fromBeginning: true });
  await one.run({ eachMessage: async () => { counts[name].seen += 1; } });
  return one;
}

async function main() {
  const admin = kafka.admin();
  await admin.connect();
  await admin.createTopics({ topics: [
    { topic: "orders", numPartitions: 3, configEntries: [{ name: "retention.ms", value: "7200000000" }] },
    { topic: "payments", numPartitions: 2 }, { topic: "short-lived", numPartitions: 1 },
  ] });
  await admin.describeConfigs({ includeSynonyms: false, resources: [{ type: 2, name: "orders" }] });
  await admin.alterConfigs({ resources: [
    { type: 2, name: "orders", configEntries: [{ name: "max.message.bytes", value: "200000" }] },
  ] });
  await admin.createPartitions({ topicPartitions: [{ topic: "payments", count: 3 }] });
  await admin.deleteTopics({ topics: ["short-lived"] });

  const producer = kafka.producer();
  await producer.connect();
  for (let n = 0; n < 5; n++) await producer.send({ topic: "orders", messages: records("orders", 25) });
  await producer.send({ topic: "payments", messages: records("payments", 40), compression: 1, acks: 1 });
  await producer.send({ topic: "events", messages: records("events", 30), acks: -1 });
  await producer.disconnect();

  const exact = kafka.producer({ idempotent: true, transactionalId: "ledger-1", maxInFlightRequests: 1 });
  await exact.connect();
  for (const ends of ["commit", "abort", "commit"]) {
    const transaction = await exact.transaction();
    await transaction.send({ topic: "payments", messages: records(`tx ${ends}`, 15) });
    if (ends === "commit") {
      await transaction.sendOffsets({
        consumerGroupId: "copiers", topics: [{ topic: "orders", partitions: [{ partition: 0, offset: "5" }] }],
      });
    }
    await transaction[ends]();
  }
  await exact.disconnect();

  const counts = {};
  const one = await member(counts, "one");
  await until(() => counts.one.seen > 100 && counts.one.partitions === 6);
  const two = await member(counts, "two");
  await until(() => counts.two.partitions > 0 && counts.one.partitions < 6);
  await one.disconnect();
  await until(() => counts.two.partitions === 6);
  await two.disconnect();

  await admin.fetchTopicMetadata({ topics: ["orders", "events"] });
  await admin.fetchOffsets({ groupId: "billing", topics: ["orders"] });
  await admin.fetchTopicOffsets("orders");
  await admin.listGroups();
  await admin.describeGroups(["billing"]);
  await admin.deleteTopicRecords({ topic: "orders", partitions: [{ partition: 0, offset: "3" }] });
  await admin.deleteGroups(["copiers"]);
  await admin.disconnect();
}

main().then(() => process.exit(0), (error) => { console.error(error); process.exit(1); });
