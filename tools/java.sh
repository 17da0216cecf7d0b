#!/usr/bin/env bash
# Makes sure that Java 17 or newer is there: checks, else installs it where that is allowed.
set -u
wanted=17
hint="Java $wanted or newer is needed for Spark; install it, for example: apt-get install openjdk-17-jre-headless"

release() {
  local java="java"
  [ -n "${JAVA_HOME:-}" ] && java="$JAVA_HOME/bin/java"
  "$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1
}

found="$(release)"
if [ -n "$found" ] && [ "$found" -ge "$wanted" ]; then
  exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
  echo "installing openjdk-17-jre-headless" >&2
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq openjdk-17-jre-headless > /dev/null
  found="$(release)"
  [ -n "$found" ] && [ "$found" -ge "$wanted" ] && exit 0
fi
echo "$hint" >&2
exit 3
