"""The gate of a gated feed-forward: which of its two ports it is, and the function act of h = act(z_gate) · z_up."""

from __future__ import annotations

from torch import fx, nn

from retrofit.sdk import CAST, DROPOUT, DoesNotFitError, FeedForward, op

REMEDY = "use controller=low-rank"


def gate_activation(site: FeedForward) -> tuple[int, fx.GraphModule]:
    """The index of the gate's port and act, which calls the same modules as `site.hidden`, dropout left out.

    Raises `DoesNotFitError` where h is not of this form, or act has parameters of its own.
    """
    if not site.gated:
        raise misfit(site, "it has no gate")
    ports = [node for node in site.hidden.graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in site.hidden.graph.nodes if node.op == "output")
    product = behind_casts(output.args[0], site.hidden)
    factors = [one for one in product.args if isinstance(one, fx.Node)] if op(product) == "mul" else []
    if len(ports) != 2 or len(factors) != 2:
        raise misfit(site, "its hidden units are not a product of its gate and another matrix's result")
    read = [ports_read(factor, ports) for factor in factors]
    linear = [behind_casts(factor, site.hidden) in ports for factor in factors]
    if {len(one) for one in read} != {1} or read[0] == read[1] or not any(linear):
        raise misfit(site, "both factors of its hidden units are more than a matrix's result")
    named = [site.into[site.ports[port].matrix].role == "gate" for (port,) in read]
    gate = linear.index(False) if False in linear else named.index(True) if True in named else 0
    (port,) = read[gate]
    activation = extract(factors[gate], ports[port], site.hidden)
    if next(activation.parameters(), None) is not None:
        raise misfit(site, "the activation of its gate has weights of its own")
    return port, activation


def misfit(site: FeedForward, why: str) -> DoesNotFitError:
    what = f"controller=gate cannot select the hidden units of the feed-forward {site.name}"
    return DoesNotFitError(what, why=why, remedy=REMEDY)


def behind_casts(node: fx.Node, hidden: fx.GraphModule) -> fx.Node:
    """The node whose value this one is, but for its precision and dropout."""
    while node.all_input_nodes and (op(node) in CAST or op(node) in DROPOUT or is_dropout(node, hidden)):
        node = node.all_input_nodes[0]
    return node


def is_dropout(node: fx.Node, hidden: fx.GraphModule) -> bool:
    return node.op == "call_module" and isinstance(
        hidden.get_submodule(str(node.target)), (nn.Identity, nn.modules.dropout._DropoutNd)
    )


def ports_read(node: fx.Node, ports: list[fx.Node]) -> frozenset[int]:
    """The indices of the ports that a node depends on."""
    behind = ancestors(node)
    return frozenset(index for index, port in enumerate(ports) if port in behind)


def ancestors(node: fx.Node) -> set[fx.Node]:
    """The node and all that it depends on."""
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            waiting.extend(one.all_input_nodes)
    return seen


def extract(result: fx.Node, port: fx.Node, hidden: fx.GraphModule) -> fx.GraphModule:
    """The function of one port that gives `result`, without dropout."""
    graph, needed = fx.Graph(), ancestors(result)
    env = {port: graph.placeholder("gate")}
    for node in hidden.graph.nodes:
        if node in needed and node not in env:
            env[node] = env[node.all_input_nodes[0]] if is_dropout(node, hidden) else graph.node_copy(node, env.__getitem__)
    graph.output(env[result])
    return fx.GraphModule(hidden, graph, "GateActivation")
