"""A cluster as a YAML file: what may stand in it, what it comes to, and what is wrong with it."""

from shoal.cluster.config.load import load_config
from shoal.cluster.config.models import ClusterConfig
from shoal.cluster.config.problems import ConfigError, Problem

__all__ = ["ClusterConfig", "ConfigError", "Problem", "load_config"]
