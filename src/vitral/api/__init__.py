"""The verbs as Python functions; `vitral` itself exports them. The command line is generated from these modules."""
