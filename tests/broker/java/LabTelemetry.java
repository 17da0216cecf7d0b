import java.util.List;
import java.util.Map;
import org.apache.kafka.common.metrics.KafkaMetric;
import org.apache.kafka.common.metrics.MetricsReporter;
import org.apache.kafka.server.telemetry.ClientTelemetry;
import org.apache.kafka.server.telemetry.ClientTelemetryReceiver;

/** A broker with this reporter offers the telemetry APIs (KIP-714). It drops what clients push. */
public class LabTelemetry implements MetricsReporter, ClientTelemetry {
    public void init(List<KafkaMetric> metrics) {}

    public void metricChange(KafkaMetric metric) {}

    public void metricRemoval(KafkaMetric metric) {}

    public void close() {}

    public void configure(Map<String, ?> configs) {}

    public ClientTelemetryReceiver clientReceiver() {
        return (context, payload) -> {};
    }
}
