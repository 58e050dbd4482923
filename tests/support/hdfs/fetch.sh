#!/usr/bin/env bash
# fetch.sh DIR: put what a real HDFS needs into DIR, once: DIR/jars (Hadoop 2.7.3 name and data
# nodes, WebHDFS) and DIR/lib/libhdfs.so (the JNI client that pyarrow loads).
#
# The server jars ship inside the source distribution of pyspark 2.4.8 (about 220 MB, 40 MB of it
# kept); Jersey 1, which WebHDFS needs, comes from Debian; libhdfs is compiled from the C sources
# in the source distribution of pydoop 2.0.0. Needs python3, a JDK 17, gcc, apt-get, dpkg.
set -euo pipefail
dir=$(mkdir -p "${1:?usage: fetch.sh DIR}" && cd "$1" && pwd)
java_home=${JAVA_HOME:-/usr/lib/jvm/java-17-openjdk-amd64}
work=$(mktemp -d "$dir/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"

# Both setup.py files import pkg_resources, which newer setuptools no longer brings.
sdist() {
  [ -x venv/bin/pip ] || { python3 -m venv venv && venv/bin/pip install -q 'setuptools<70' wheel; }
  venv/bin/pip download -q --no-deps --no-binary :all: --no-build-isolation "$1"
}

if [ ! -e "$dir/jars/complete" ]; then
  sdist pyspark==2.4.8
  mkdir -p "$dir/jars"
  patterns=(hadoop-'[ahc]*' commons-'*' guava-'*' protobuf-java-'*' jetty-'*' javax.servlet-api-'*'
    slf4j-'*' log4j-'*' htrace-core-'*' netty-'*' jackson-'*-asl-*' jackson-jaxrs-'*' jackson-xc-'*'
    jaxb-api-'*' activation-'*' xercesImpl-'*' xmlenc-'*' leveldbjni-'*' zookeeper-'*' curator-'*'
    apacheds-'*' api-'*' avro-1'*' gson-'*' jsr305-'*' http'*' snappy-java-'*' javax.inject-1.jar)
  tar xf pyspark-2.4.8.tar.gz --wildcards --strip-components=3 -C "$dir/jars" \
    "${patterns[@]/#/pyspark-2.4.8/deps/jars/}"
  # Downloading as root into a folder apt's own user cannot enter would only warn.
  apt-get -qq -o APT::Sandbox::User=root download libjersey1-core-java libjersey1-server-java \
    libjersey1-servlet-java libasm-java libjsr311-api-java libcommons-daemon-java
  for package in *.deb; do dpkg -x "$package" debian; done
  cp -L debian/usr/share/java/{jersey1-core,jersey1-server,jersey1-servlet,asm,jsr311-api,commons-daemon}.jar "$dir/jars/"
  touch "$dir/jars/complete"
fi

if [ ! -e "$dir/lib/libhdfs.so" ]; then
  sdist pydoop==2.0.0
  tar xf pydoop-2.0.0.tar.gz
  cd pydoop-2.0.0/src/libhdfs
  [ -s config.h ] || : >config.h
  mkdir -p "$dir/lib"
  gcc -O2 -fPIC -shared -w -D_GNU_SOURCE -I. -Iinclude -Ios/posix -Icommon \
    -I"$java_home/include" -I"$java_home/include/linux" \
    hdfs.c exception.c jni_helper.c common/htable.c os/posix/mutexes.c \
    os/posix/thread_local_storage.c os/posix/thread.c \
    -L"$java_home/lib/server" -ljvm -Wl,-rpath,"$java_home/lib/server" -lpthread -ldl \
    -o "$dir/lib/libhdfs.so.part"
  mv "$dir/lib/libhdfs.so.part" "$dir/lib/libhdfs.so"
fi
