"""Sites are followed from the dense model through every pass, and another dense model is refused."""

from __future__ import annotations

import copy

import pytest
from support.tiny_models import gpt2, llama

import retrofit
from retrofit.errors import TrainingError
from retrofit.pipeline.corresponding_sites import CorrespondingSite, corresponding_sites


@pytest.mark.long
def test_a_site_is_followed_through_the_wrappers_of_later_passes() -> None:
    dense = llama()
    model = retrofit.apply(
        copy.deepcopy(dense), "sparse-ffn(sparsity=4)", "altup(k=2)", "sequence-altup(k=2, layers=1)", verify=False
    )
    sites = corresponding_sites(model, dense)
    assert [(site.dense, site.method) for site in sites] == [
        ("model.layers.0.mlp", "sparse-ffn"),
        ("model.layers.1", "sequence-altup"),
        ("model.layers.1.mlp", "sparse-ffn"),
    ]
    for site in sites:
        assert type(dense.get_submodule(site.dense)) is not type(model.get_submodule(site.rewritten))
    assert sites[0].rewritten == "model.layers.0.layer.mlp"  # inside AltUp's wrapper


def test_exact_passes_leave_nothing_to_learn() -> None:
    dense = gpt2()
    model = retrofit.apply(copy.deepcopy(dense), "altup(k=2)", verify=False)
    assert corresponding_sites(model, dense) == ()


def test_other_teachers_are_refused_with_what_differs() -> None:
    dense = llama()
    model = retrofit.apply(copy.deepcopy(dense), "sparse-ffn(sparsity=4)", verify=False)
    with pytest.raises(TrainingError, match="not the dense model") as wider:
        corresponding_sites(model, llama(intermediate_size=40))
    assert "24" in wider.value.why and "40" in wider.value.why
    with pytest.raises(TrainingError, match="retrofitted model itself"):
        corresponding_sites(model, model)
    with pytest.raises(TrainingError, match="a dense one"):
        corresponding_sites(dense, dense)


def test_a_site_names_both_paths_where_they_differ() -> None:
    assert str(CorrespondingSite("a.mlp", "a.layer.mlp", "sparse-ffn")) == "a.layer.mlp (of the dense model: a.mlp)"
    assert str(CorrespondingSite("a", "a", "sparse-ffn")) == "a"
