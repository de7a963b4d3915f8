"""What ``kvtide up`` is: one process that starts, watches and ends all the others."""
