"""How long a rollout batch takes from one process to another: this transport, its peers, the machine's limits."""
