"""Policy gradients: one implementation with settings for its parts; PPO is one combination."""
