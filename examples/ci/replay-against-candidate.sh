#!/usr/bin/env bash
# Does a candidate broker still answer a recorded workload as the broker of the recording did?
#
#   examples/ci/replay-against-candidate.sh [CAPTURE] [options of `kdissect replay`]
#
# Fetches the broker's jars from Maven Central (kept in $KAFKA_JARS), starts an empty broker with the
# settings of $BROKER_PROPERTIES on loopback, replays the capture with everything allowed, and leaves
# replay.xml (JUnit), replay.jsonl and replay.html in $OUT. Exit code: that of the replay, so 1 where
# answers differ; 3 where the broker does not start, 4 where its jars cannot be fetched.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
capture=${1:-$here/../../captures/sarama.pcap.gz}
shift || true
version=${KAFKA_VERSION:-4.3.1}
jars=${KAFKA_JARS:-$HOME/.cache/kdissect-brokers/ci-$version}
out=${OUT:-out/replay}
kdissect=${KDISSECT:-kdissect}
port=${PORT:-19092}
controller_port=${CONTROLLER_PORT:-$((port + 1))}
work=$(mktemp -d)

if [ ! -e "$jars/.complete" ]; then
  mkdir -p "$jars"
  if ! mvn -q -B -f "$here/kafka-broker.pom.xml" -Dkafka.version="$version" \
    dependency:copy-dependencies -DoutputDirectory="$jars"; then
    echo "replay: Maven cannot fetch Kafka $version" >&2
    exit 4
  fi
  touch "$jars/.complete"
fi

cat > "$work/log4j2.properties" <<LOG
appender.file.type=File
appender.file.name=file
appender.file.fileName=$work/server.log
appender.file.layout.type=PatternLayout
appender.file.layout.pattern=%d %p %c - %m%n
rootLogger.level=info
rootLogger.appenderRef.file.ref=file
LOG
cat > "$work/server.properties" <<CONFIG
process.roles=broker,controller
node.id=1
listeners=PLAINTEXT://127.0.0.1:$port,CONTROLLER://127.0.0.1:$controller_port
controller.listener.names=CONTROLLER
controller.quorum.bootstrap.servers=127.0.0.1:$controller_port
log.dirs=$work/data
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=300
# Records keep their captured times: else the broker would delete old ones after half a minute.
log.initial.task.delay.ms=3600000
log.cleaner.dedupe.buffer.size=2097152
CONFIG
cat "${BROKER_PROPERTIES:-$here/broker.properties}" >> "$work/server.properties"

# An array, not a function: in the background, $! is then Java's process and not a shell around it.
kafka=(java -Xmx400m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 "-Djava.io.tmpdir=$work"
  "-Dlog4j2.configurationFile=$work/log4j2.properties" -cp "$jars/*")
"${kafka[@]}" kafka.tools.StorageTool format -t kdissect-CI-cluster-00 -c "$work/server.properties" \
  --standalone > "$work/format.log" 2>&1 || { cat "$work/format.log" >&2; exit 3; }
"${kafka[@]}" kafka.Kafka "$work/server.properties" > "$work/console.log" 2>&1 &
broker=$!
trap 'kill $broker 2>/dev/null || true; wait $broker 2>/dev/null || true; rm -rf "$work"' EXIT
not_started() {
  echo "replay: Kafka $version does not start: $1" >&2
  tail -n 20 "$work/console.log" "$work/server.log" >&2 || true
  exit 3
}
started=
for _ in $(seq 300); do
  grep -q 'Kafka Server started' "$work/server.log" 2>/dev/null && started=1 && break
  kill -0 $broker 2>/dev/null || not_started "it ended"
  sleep 0.2
done
[ -n "$started" ] || not_started "not within a minute"

mkdir -p "$out"
status=0
$kdissect replay "$capture" --to "127.0.0.1:$port" \
  --allow produce,groups,transactions,admin --create-topics \
  --junit "$out/replay.xml" --json "$out/replay.jsonl" --html "$out/replay.html" \
  "$@" || status=$?
exit $status
