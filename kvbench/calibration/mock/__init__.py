"""A mock server with a known schedule, which stamps when it sends: what the load client is calibrated against."""
