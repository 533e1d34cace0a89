"""An agent of pydantic-ai, as its own documentation would have it."""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

PRICES = {"tea": 3, "milk": 2}


def price(product: str) -> int:
    """The price of a product in euros."""
    return PRICES[product]


async def shops(url, api_key, task):
    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=f"{url}/v1", api_key=api_key))
    result = await Agent(model, instructions="Be brief.", tools=[price]).run(task["prompt"])
    return float(result.output == task["right"])
