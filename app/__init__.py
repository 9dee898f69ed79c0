"""OpenAI protocol, fan-out and the Ray graph; imports `deployments`, never the other way round."""

__version__ = "0.1.0"
