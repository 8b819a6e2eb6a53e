"""Policy gradients: one implementation whose parts are settings; PPO is one choice of them."""
