"""Many processes: replicas (ddp) and parameters sharded by rows (fsdp2)."""
