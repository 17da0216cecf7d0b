import java.time.Duration;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;

/** Writes or reads a topic: JavaClient produce|consume TOPIC NAME=VALUE ...; SIGTERM ends it. */
public final class JavaClient {
    private static final Properties CONFIG = new Properties();
    private static final Map<String, Integer> APP = new HashMap<>();
    private static String brokers;
    private static volatile boolean isStopping = false;

    public static void main(String[] args) throws Exception {
        for (int i = 2; i < args.length; i++) {
            String[] pair = args[i].split("=", 2);
            if (pair[0].startsWith("app.")) {
                APP.put(pair[0].substring(4), Integer.parseInt(pair[1]));
            } else {
                CONFIG.put(pair[0], pair[1]);
            }
        }
        brokers = CONFIG.getProperty("bootstrap.servers");
        Thread main = Thread.currentThread();
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            isStopping = true;
            try {
                main.join(5000);
            } catch (InterruptedException e) {
                return;
            }
        }));
        if (args[0].equals("produce")) {
            produce(args[1]);
        } else {
            consume(args[1]);
        }
    }

    /** app.burst records of app.size bytes each app.pause_ms; app.renew: a producer for each. */
    private static void produce(String topic) throws Exception {
        byte[] value = new byte[APP.getOrDefault("size", 60)];
        newProducer("127.0.0.1:1").close(); // loads the classes, and connects to no broker
        System.out.println("started");
        KafkaProducer<byte[], byte[]> producer = newProducer(brokers);
        while (!isStopping) {
            for (int i = 0; i < APP.getOrDefault("burst", 1); i++) {
                producer.send(new ProducerRecord<>(topic, value));
            }
            if (APP.containsKey("renew")) {
                producer.close();
                producer = newProducer(brokers);
            }
            Thread.sleep(APP.getOrDefault("pause_ms", 30));
        }
        producer.close(Duration.ofSeconds(1));
    }

    private static KafkaProducer<byte[], byte[]> newProducer(String brokers) {
        CONFIG.put("bootstrap.servers", brokers);
        String serializer = "org.apache.kafka.common.serialization.ByteArraySerializer";
        CONFIG.put("key.serializer", serializer);
        CONFIG.put("value.serializer", serializer);
        return new KafkaProducer<>(CONFIG);
    }

    /** app.work_ms: the time that a poll's records take; app.stuck_at: an offset that fails. */
    private static void consume(String topic) throws Exception {
        String deserializer = "org.apache.kafka.common.serialization.ByteArrayDeserializer";
        CONFIG.put("key.deserializer", deserializer);
        CONFIG.put("value.deserializer", deserializer);
        CONFIG.putIfAbsent("auto.offset.reset", "earliest");
        KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(CONFIG);
        System.out.println("started");
        consumer.subscribe(List.of(topic), new ConsumerRebalanceListener() {
            @Override
            public void onPartitionsRevoked(Collection<TopicPartition> partitions) {}

            @Override
            public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
                System.out.println("assigned " + partitions.size());
            }
        });
        int stuckAt = APP.getOrDefault("stuck_at", -1);
        boolean isStuck = false;
        while (!isStopping) {
            ConsumerRecords<byte[], byte[]> records = consumer.poll(Duration.ofMillis(100));
            for (ConsumerRecord<byte[], byte[]> record : records) {
                if (stuckAt >= 0 && record.offset() >= stuckAt) {
                    consumer.seek(new TopicPartition(record.topic(), record.partition()), stuckAt);
                    if (!isStuck) {
                        System.out.println("stuck");
                    }
                    isStuck = true;
                    Thread.sleep(APP.getOrDefault("retry_ms", 200));
                    break;
                }
            }
            if (!records.isEmpty() && !isStopping) {
                Thread.sleep(APP.getOrDefault("work_ms", 0));
            }
        }
        consumer.close();
    }
}
