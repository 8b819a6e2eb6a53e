"""The worker of a rollout task: it makes samples for whichever incarnation is the newest."""
