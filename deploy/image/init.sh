#!/bin/sh
# Runs before the services: makes the keys, once, and gets the model that they begin with.
#
#   /keys/admin    the deployment's admin key; printed when it is made
#   /keys/engine   the key that proxy and trainer send to the engine
#   /data/policy   a link to the model directory: BRIDLE_MODEL's, or else the demo's
set -eu
umask 077
if [ -n "$BRIDLE_MODEL" ] && [ -z "$BRIDLE_AGENT" ]; then
  echo "BRIDLE_MODEL is trained in an agent of yours: set BRIDLE_AGENT and BRIDLE_TASKS too" >&2
  exit 1
fi
for key in engine admin; do
  [ ! -s "/keys/$key" ] || continue
  python3 -c 'import secrets; print(secrets.token_urlsafe(32))' >"/keys/$key"
  [ "$key" = engine ] || echo "Admin key (also in the volume \"keys\"): $(cat /keys/admin)"
done
if [ -n "$BRIDLE_MODEL" ]; then
  policy=$(python3 -c 'import sys; from bridle.run.hub import model_directory as d; print(d(sys.argv[1]))' "$BRIDLE_MODEL")
else
  policy=$(python3 -c 'from bridle.recipes.models.smollm2 import smollm2_directory as d; print(d())')
fi
for file in "$policy"/config.json "$policy"/*.safetensors; do
  [ -r "$file" ] || {
    echo "$file cannot be read by user $(id -u): chmod -R a+rX the model directory" >&2
    exit 1
  }
done
ln -sfn "$policy" /data/policy
echo "Policy: $policy"
