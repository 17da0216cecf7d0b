"""What tests are made of: packets, capture files, connections, messages, tables, workloads."""
