"""Many models on one machine: which are resident, who holds them, what their streams say."""
