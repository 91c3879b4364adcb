"""What the operator and the worker agree on; imports neither torch nor a Kubernetes client."""
