#!/bin/sh
# Runs before the services: makes the keys, once, and gets the model that they begin with.
#
#   /keys/admin    the deployment's admin key; printed when it is made
#   /data/policy   a link to the model directory: BRIDLE_MODEL's at /model, or else the demo's
set -eu
umask 077
if [ ! -s /keys/admin ]; then
  python3 -c 'import secrets; print(secrets.token_urlsafe(32))' >/keys/admin
  echo "Admin key (also in the volume \"keys\"): $(cat /keys/admin)"
fi
if [ -e /model/config.json ]; then
  policy=/model
else
  policy=$(python3 -c 'from bridle.trainer.policy.smollm2 import smollm2_directory as d; print(d())')
fi
for file in "$policy"/config.json "$policy"/*.safetensors; do
  [ -r "$file" ] || {
    echo "$file cannot be read by user $(id -u): chmod -R a+rX the model directory" >&2
    exit 1
  }
done
ln -sfn "$policy" /data/policy
echo "Policy: $policy"
