"""A dashboard for Grafana: `shoal.json`, which `make.py` writes of `panels.py`."""
