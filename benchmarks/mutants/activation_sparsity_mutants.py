"""Faults of activation-sparsity: the masks, the modules around the products, the thresholds, the levels."""

from __future__ import annotations

import functools

from mutant import Mutant, on

CALIBRATED = on("gpt2 llama t5 bert", "activation-sparsity", "calibrated")
CENTRED = on("gpt2 llama", "activation-sparsity(centre=true)", "calibrated")
MIXTURE = on("mixtral", "activation-sparsity", "calibrated")
TESTS = "tests/passes/activation_sparsity/test_activation_sparsity.py"

masks = functools.partial(Mutant, "activation-sparsity", "passes/activation_sparsity/masked_products.py")
sites = functools.partial(Mutant, "activation-sparsity", "passes/activation_sparsity/sites.py")
levels = functools.partial(Mutant, "activation-sparsity", "passes/activation_sparsity/levels.py")
whole = functools.partial(Mutant, "activation-sparsity", "passes/activation_sparsity/activation_sparsity.py")

MUTANTS = [
    masks(
        "entries are compared with their sign",
        "x.masked_fill(x.abs() < threshold, 0.0)",
        "x.masked_fill(x < threshold, 0.0)",
        trials=CALIBRATED,
    ),
    masks(
        "large entries are masked, and not small ones",
        "x.masked_fill(x.abs() < threshold, 0.0)",
        "x.masked_fill(x.abs() > threshold, 0.0)",
        trials=CALIBRATED,
    ),
    masks(
        "what is small beside the centre becomes zero",
        "torch.where((x - centre).abs() < threshold, centre, x)",
        "torch.where((x - centre).abs() < threshold, torch.zeros_like(centre), x)",
        trials=CENTRED,
    ),
    masks(
        "entries are measured from zero in spite of the centre",
        "torch.where((x - centre).abs() < threshold, centre, x)",
        "torch.where(x.abs() < threshold, centre, x)",
        trials=CENTRED,
    ),
    masks(
        "masked entries get no gradient",
        "            return kept.detach() + (x - x.detach())\n",
        "            return kept\n",
        trials=CALIBRATED,
    ),
    masks(
        "the layer reads its input unmasked",
        "        container[key] = self.mask(container[key])\n",
        "        self.mask(container[key])\n",
        trials=CALIBRATED,
    ),
    masks(
        "in the code of experts nothing is masked",
        "            args, kwargs = self.masked(function, mask, args, kwargs)\n",
        "            self.masked(function, mask, args, kwargs)\n",
        trials=MIXTURE,
        test=f"{TESTS}::test_experts_read_masked_inputs_whichever_way_they_are_run",
    ),
    masks(
        "only products with a whole weight are masked, not those with one expert's",
        "        if all(id(value) in self.known for value in given):\n",
        "        if not given:\n",
        trials=MIXTURE,
        test=f"{TESTS}::test_experts_read_masked_inputs_whichever_way_they_are_run",
    ),
    masks(
        "thresholds stay where a dial has turned them",
        "                module.share = share\n",
        "                module.share = min(share, 0.5)\n",
        trials=CALIBRATED,
        test=f"{TESTS}::test_a_dial_turns_the_thresholds",
    ),
    sites(
        "routers are masked too",
        'if projection.role == "router":',
        'if projection.role == "no router":',
        trials=MIXTURE,
        test=f"{TESTS}::test_routers_are_left_alone_with_the_reason",
    ),
    sites(
        "where=down chooses all of a feed-forward",
        '(where == "down" and is_ffn and role == "down")',
        '(where == "down" and is_ffn)',
        trials=on("llama", "activation-sparsity(where=down)", "calibrated"),
        test=f"{TESTS}::test_where_chooses_the_layers",
    ),
    sites(
        "an input that is masked is masked again",
        "        if is_masked(self.anatomy.model, path):\n",
        "        if False:\n",
        trials=on("llama", "activation-sparsity(where=down)", "calibrated"),
        test=f"{TESTS}::test_an_input_is_masked_once",
    ),
    levels(
        "the threshold is the quantile of what is kept",
        "place, count = round(level * len(self.ordered)), len(self.ordered)",
        "place, count = round((1 - level) * len(self.ordered)), len(self.ordered)",
        trials=CALIBRATED,
        test=f"{TESTS}::test_the_share_of_zeros_is_the_level",
    ),
    levels(
        "the greedy path takes the dearest step",
        "(fresh[path] - steps.reached) / saved",
        "(steps.reached - fresh[path]) / saved",
        trials=CALIBRATED,
        test=f"{TESTS}::test_the_greedy_path_takes_the_cheapest_step",
    ),
    levels(
        "a step counts as if all weights were of one size",
        "saved = (higher - steps.levels[path]) * self.masks.weights[path].elements",
        "saved = higher - steps.levels[path]",
        trials=CALIBRATED,
        test=f"{TESTS}::test_the_greedy_path_takes_the_cheapest_step",
    ),
    whole(
        "nothing is measured, and the thresholds stay zero",
        "            self.fit(plan, edit, edit.calibration)\n",
        "            pass\n",
        trials=CALIBRATED,
    ),
    whole(
        "greedy levels are those of uniform",
        'if self.allocation == "greedy" else {}',
        'if self.allocation == "best" else {}',
        trials=CALIBRATED,
        test=f"{TESTS}::test_greedy_levels_cost_less_than_equal_ones",
    ),
    whole(
        "loss= takes the level above the one it allows",
        "    return low\n",
        "    return high\n",
        trials=on("t5", "activation-sparsity(loss=0.01)", "calibrated"),
        test=f"{TESTS}::test_without_a_loss_the_divergence_of_predictions_gives_it",
    ),
]
