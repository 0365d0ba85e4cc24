#!/bin/sh
# Entry point of the images: a run file names its secrets by environment variables, and Docker hands
# secrets over as files. Every file of /run/secrets that is named as a variable becomes that
# variable (an empty one does not), then the command runs.
set -eu
folder=${TUNESERVE_SECRETS:-/run/secrets}
for file in "$folder"/*; do
  name=${file##*/}
  case $name in *[!A-Z0-9_]* | [0-9]*) continue ;; esac
  [ -f "$file" ] || continue
  [ -r "$file" ] || {
    echo "error: $file: user $(id -u) cannot read it; expected a file that the container's user reads: chmod 644 it on the host, in a folder of mode 700" >&2
    exit 2
  }
  value=$(cat "$file")
  [ -z "$value" ] || export "$name=$value"
done
exec "$@"
