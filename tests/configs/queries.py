"""The queries of the dashboard and of the alert rules, and which metrics with which labels they need."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import promql_parser
import yaml
from prometheus_client.parser import text_string_to_metric_families

CONFIGS = Path(__file__).parents[2] / "configs"
DASHBOARD = CONFIGS / "grafana/jaxpaged.json"
ALERTS = CONFIGS / "prometheus/alerts.yml"
VARIABLES = {"$__rate_interval": "5m", "$model_name": ".*", "$instance": ".*"}
OF_PROMETHEUS = {"up": {"job", "instance"}}
ADDED = {"job", "instance"}
"""Labels that Prometheus adds to what it reads."""
OF_FAILURES = {"status": {"5xx"}, "grpc_code": {"INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS"}}
"""Values of labels that are there once something has failed; `RequestCounts` and grpcio's StatusCode make them."""


def panels() -> list[dict]:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]


def rules() -> list[dict]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """(where it stands, the query with Grafana's variables filled in)"""
    for panel in panels():
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']!r}", filled(target["expr"])
    for rule in rules():
        yield f"rule {rule['alert']}", rule["expr"]


def filled(query: str) -> str:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query, f"{query} has a variable that the dashboard does not define"
    return query


def variable_queries() -> Iterator[tuple[str, str, str]]:
    """(name, query, label) of the dashboard's variables that list the values of a label."""
    for variable in json.loads(DASHBOARD.read_text(encoding="utf-8"))["templating"]["list"]:
        if variable["type"] == "query":
            query, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
            yield variable["name"], filled(query), label


def needs(query: str) -> Iterator[tuple[str, set[str]]]:
    """(metric, labels) for every selector of a query: those that it matches, and those by which its values are put
    together."""
    for node, kept in selectors(query):
        yield node.name, kept | {matcher.name for matcher in node.matchers.matchers}


def matched(query: str) -> Iterator[tuple[str, str, str]]:
    """(metric, label, value) for every value that a query looks for, or leaves out, by its name."""
    for node, _ in selectors(query):
        for matcher in node.matchers.matchers:
            for value in matcher.value.split("|") if matcher.name not in ADDED else ():
                if value != ".*":
                    yield node.name, matcher.name, value


def selectors(query: str) -> Iterator[tuple[promql_parser.VectorSelector, set[str]]]:
    """The selectors of a query, each with the labels by which its values are put together."""
    yield from of_node(promql_parser.parse(query), set())


def of_node(node, kept: set[str]) -> Iterator[tuple[promql_parser.VectorSelector, set[str]]]:
    match node:
        case promql_parser.VectorSelector():
            yield node, kept
        case promql_parser.MatrixSelector():
            yield from of_node(node.vector_selector, kept)
        case promql_parser.AggregateExpr():
            by = node.modifier
            assert by is None or by.type == promql_parser.AggModifierType.By, "write what is kept, not what is not"
            yield from of_node(node.expr, set(by.labels) if by else set())
        case promql_parser.BinaryExpr():
            yield from of_node(node.lhs, kept)
            yield from of_node(node.rhs, kept)
        case promql_parser.Call():
            for argument in node.args:
                yield from of_node(argument, kept)
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            yield from of_node(node.expr, kept)
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            pass
        case _:
            raise AssertionError(f"{type(node).__name__} is not understood")


def exposed(text: str) -> dict[str, set[str]]:
    """The labels of every name of samples in the text of `/metrics`."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def problems(text: str) -> list[str]:
    """What dashboard and rules need of the text of `/metrics` that is not there."""
    there = {name: labels | ADDED for name, labels in exposed(text).items()} | OF_PROMETHEUS
    found = [
        *queries(),
        *((f"variable {name!r}", f"sum by ({label}) ({query})") for name, query, label in variable_queries()),
    ]
    values = {
        (sample.name, *pair)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        for pair in sample.labels.items()
    }
    missing = [missing for where, query in found for missing in missing_of(where, query, there)]
    return missing + [unknown for where, query in found for unknown in unknown_values(where, query, values)]


def missing_of(where: str, query: str, there: Mapping[str, set[str]]) -> Iterator[str]:
    for name, labels in needs(query):
        if name not in there:
            yield f"{where} asks for {name}, which is not there"
        elif not labels <= there[name]:
            yield f"{where} asks for {', '.join(sorted(labels - there[name]))} of {name}, which it has not"


def unknown_values(where: str, query: str, values: Collection[tuple[str, str, str]]) -> Iterator[str]:
    """`values`: (metric, label, value) of what is there."""
    for name, label, value in matched(query):
        if (name, label, value) not in values and value not in OF_FAILURES.get(label, ()):
            yield f"{where} asks for {name} whose {label} is {value!r}, which it never is"
