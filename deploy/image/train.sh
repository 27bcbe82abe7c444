#!/bin/sh
# The loop with the services engine and proxy: the demo's, or with BRIDLE_AGENT that of one's own agent.
# It goes on where it was, and is over at once where it had ended.
set -eu
if [ "$(id -u)" = 0 ]; then
  kept=+chown,+kill,+setgid,+setuid
  groups=--clear-groups
  if [ -n "${BRIDLE_SANDBOX:-}" ]; then
    # What sessions' containers mount lies there, and the group may use their engine's socket.
    chown 10001 "$TMPDIR"
    groups=--groups=$BRIDLE_CONTAINER_GROUP
  fi
  exec setpriv --reuid=10001 --regid=10001 "$groups" \
    --inh-caps="-all,$kept" --ambient-caps="-all,$kept" "$0"
fi
echo "Sessions and figures: $BRIDLE_PAGES"
echo "It asks for the admin key: docker compose exec proxy cat /keys/admin"
engine=http://net:8000
if [ -z "$BRIDLE_AGENT" ]; then
  exec bridle demo --engine-url "$engine" --out /data/demo --directory /sessions --steps "$BRIDLE_STEPS" \
    --set groups="$BRIDLE_GROUPS" --set learning_rate="$BRIDLE_LEARNING_RATE" \
    --set minutes="$BRIDLE_MINUTES" --set eval_tasks="$BRIDLE_EVAL_TASKS"
fi
exec bridle train --engine-url "$engine" --policy /data/policy --out /data/train \
  --agent "$BRIDLE_AGENT" --tasks "$BRIDLE_TASKS" --verifier "$BRIDLE_VERIFIER" --steps "$BRIDLE_STEPS" \
  --set agent.directory=/sessions --set agent.sandbox="${BRIDLE_SANDBOX:-}" \
  --set groups.per_step="$BRIDLE_GROUPS" --set groups.size="$BRIDLE_GROUP_SIZE" \
  --set training.optimizer.learning_rate="$BRIDLE_LEARNING_RATE" \
  --set training.lora.rank="$BRIDLE_LORA_RANK" \
  --set evaluation.every="$BRIDLE_EVALUATE_EVERY" --set evaluation.split="$BRIDLE_EVALUATION_SPLIT"
