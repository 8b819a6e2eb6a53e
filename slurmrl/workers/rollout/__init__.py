"""The worker of a rollout task, which generates samples for the newest incarnation."""
