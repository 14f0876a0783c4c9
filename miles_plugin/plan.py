from miles_plugin.arguments import TrainConfig
from miles_plugin.preflight import Plan


def describe(config: TrainConfig, plan: Plan) -> str:
    return ""
