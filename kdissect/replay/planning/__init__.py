"""From a workload to steps: what is sent, when, and what each step waits for."""
