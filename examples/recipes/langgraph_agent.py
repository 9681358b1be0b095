"""A LangGraph agent: a graph with a model and a tool. Needs `langgraph` and `langchain-openai`.

stepwell train --config quickstart rollout.agent=examples.recipes.langgraph_agent:agent
"""

import re
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from openai import DefaultAsyncHttpxClient

HTTP = DefaultAsyncHttpxClient()
"""One connection pool for all rollouts."""


@tool
def calculator(expression: str) -> str:
    """Add and subtract whole numbers."""
    expression = expression.replace(" ", "")
    if not re.fullmatch(r"-?\d+([+-]\d+)*", expression):
        return "error: not a sum"
    return str(sum(map(int, re.findall(r"[+-]?\d+", expression))))


async def call_model(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
    return {"messages": [await config["configurable"]["model"].ainvoke(state["messages"])]}


GRAPH = (
    StateGraph(MessagesState)
    .add_node("model", call_model)
    .add_node("tools", ToolNode([calculator]))
    .add_edge(START, "model")
    .add_conditional_edges("model", tools_condition)
    .add_edge("tools", "model")
    .compile()
)


async def agent(task: Any, base_url: str, api_key: str) -> float:
    """One rollout: the product's graph, with the model at this rollout's address."""
    model = ChatOpenAI(
        model="policy",
        base_url=f"{base_url}/v1",
        api_key=api_key,
        http_async_client=HTTP,
        max_completion_tokens=48,
    ).bind_tools([calculator])
    config = {"configurable": {"model": model}, "recursion_limit": 8}
    try:
        state = await GRAPH.ainvoke({"messages": [("user", task["question"])]}, config)
    except GraphRecursionError:
        return 0.0  # it never answered
    return float(state["messages"][-1].text.strip() == task["answer"])
