"""The worker of a rollout task, which makes samples for the newest incarnation."""
