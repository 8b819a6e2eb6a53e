"""From a configuration to what runs where: settings (checked together with the algorithm's own),
and the plan that the agents and the master follow."""
