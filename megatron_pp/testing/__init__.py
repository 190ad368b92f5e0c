"""For tests of pipelines: ranks as threads, an in-memory transport, adversarial transports, a toy model."""
