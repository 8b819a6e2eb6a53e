"""Memory, FLOPs and seconds of a plan, from the models' shapes and the data sheets of GPUs."""
