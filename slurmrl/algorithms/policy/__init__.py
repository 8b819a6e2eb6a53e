"""Policy gradients: one implementation whose settings select the method, such as PPO or GRPO."""
