"""What tests of pipelines need, the project's own and its users': ranks as threads, an in-memory transport, ranks as
processes.
"""
