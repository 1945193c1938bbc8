from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ambiseg.transport import couple, optimal_plan, relaxed_objective
from tests import reference


def problem(seed: int, B: int = 3, N: int = 5, M: int = 4):
    g = torch.Generator().manual_seed(seed)
    cost = torch.rand(B, N, M, generator=g, dtype=torch.float64)
    weights = torch.rand(B, M, generator=g, dtype=torch.float64) + 0.05
    return cost, weights / weights.sum(1, keepdim=True)


sizes = st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
loads = st.floats(1.0, 3.0)  # capacity · N: how many times the annotations' mass would fit

# -- couplings -----------------------------------------------------------------------------------------------


def test_hand_case_where_greedy_is_not_optimal():
    """Annotation 0 goes first and takes sample 0; annotation 1 is left with the sample that costs it 1."""
    cost = torch.tensor([[[0.0, 0.1], [0.2, 1.0]]])
    v = torch.tensor([[0.5, 0.5]])
    assert couple(cost, v, 0.5, "greedy")[0].tolist() == [[0.5, 0.0], [0.0, 0.5]]
    assert couple(cost, v, 0.5, "exact")[0].tolist() == [[0.0, 0.5], [0.5, 0.0]]
    assert couple(cost, v, 1.0)[0].tolist() == [[0.5, 0.5], [0.0, 0.0]]


@given(st.integers(0, 10**6), sizes, st.sampled_from([1.0, 2.0]), st.sampled_from(["greedy", "exact", "released"]))
def test_from_capacity_1_every_solver_takes_the_nearest_sample(seed, size, capacity, solver):
    cost, v = problem(seed, *size)
    plan = couple(cost, v, capacity, solver)
    assert torch.allclose((plan * cost).sum((1, 2)), (v * cost.amin(1)).sum(1))
    assert torch.allclose(plan.sum(1), v)


@given(st.integers(0, 10**6), sizes, loads)
def test_greedy_is_the_papers_algorithm(seed, size, load):
    cost, v = problem(seed, *size)
    capacity = load / size[1]
    if capacity >= 1:
        return
    expected = [reference.greedy(c, w, capacity) for c, w in zip(cost.numpy(), v.numpy(), strict=True)]
    assert np.allclose(couple(cost, v, capacity).numpy(), expected)


@given(st.integers(0, 10**6), sizes, loads)
def test_greedy_is_feasible_and_exact_is_never_worse(seed, size, load):
    cost, v = problem(seed, *size)
    capacity = load / size[1]
    plans = {solver: couple(cost, v, capacity, solver) for solver in ("greedy", "exact")}
    for plan in plans.values():
        assert (plan >= 0).all()
        assert torch.allclose(plan.sum(1), v)
        assert (plan.sum(2) <= min(1.0, capacity) + 1e-9).all()
    value = {solver: (plan * cost).sum((1, 2)) for solver, plan in plans.items()}
    assert (value["exact"] <= value["greedy"] + 1e-9).all()


@given(st.integers(0, 10**6), st.tuples(st.integers(1, 3), st.integers(2, 6), st.integers(1, 5)), loads)
def test_exact_reaches_the_optimum_of_a_linear_programme(seed, size, load):
    """Against scipy's LP solver, with the inequality written as an inequality."""
    from scipy.optimize import linprog

    cost, v = problem(seed, *size)
    _, N, M = size
    capacity = load / N
    found = (couple(cost, v, capacity, "exact") * cost).sum((1, 2)).numpy()
    rows = np.kron(np.eye(N), np.ones(M))
    columns = np.kron(np.ones(N), np.eye(M))
    for value, c, w in zip(found, cost.numpy(), v.numpy(), strict=True):
        lp = linprog(c.ravel(), A_ub=rows, b_ub=np.full(N, capacity + 1e-12), A_eq=columns, b_eq=w)
        assert lp.status == 0
        assert value == pytest.approx(lp.fun, abs=1e-8)


def test_capacity_of_exactly_one_over_n_fills_every_sample():
    cost, v = problem(1, 2, 32, 32)
    for solver in ("greedy", "exact"):
        plan = couple(cost.float(), v.float(), 1 / 32, solver)
        assert torch.allclose(plan.sum(2), torch.full((2, 32), 1 / 32), atol=1e-6)
        assert torch.allclose(plan.sum(1), v.float(), atol=1e-6)


@pytest.mark.parametrize("solver", ["greedy", "exact", "released"])
@pytest.mark.parametrize("capacity", [0.4, 1.0])
def test_absent_annotators_change_nothing(solver, capacity):
    cost, v = problem(2, 3, 5, 4)
    padded_cost = torch.cat([torch.zeros(3, 5, 1, dtype=torch.float64), cost], 2)  # the padding is everyone's nearest
    padded = couple(padded_cost, torch.cat([torch.zeros(3, 1, dtype=torch.float64), v], 1), capacity, solver)
    assert torch.allclose(padded[..., 1:], couple(cost, v, capacity, solver))
    assert padded[..., 0].abs().sum() == 0


@pytest.mark.parametrize("name", ["lidc", "city"])
@pytest.mark.parametrize("capacity", ["1", "0.5", "0.25"])
def test_golden_couplings_of_the_released_code(golden, name, capacity):
    cost, v, expected = (golden(f"{name}_{k}") for k in ("cost", "annotation_weights", f"coupling_gamma{capacity}"))
    assert torch.allclose(couple(cost, v, float(capacity), "released"), expected, atol=1e-6, rtol=0)
    paper = couple(cost, v, float(capacity), "greedy")
    assert torch.allclose(paper, expected, atol=1e-6, rtol=0) == (name == "lidc" or capacity == "1")
    assert (paper.sum(2) <= float(capacity) + 1e-6).all()


def test_plans_carry_no_gradient():
    cost, v = problem(0)
    for capacity in (0.5, 1.0):
        assert not couple(cost.requires_grad_(), v, capacity).requires_grad


@pytest.mark.parametrize(
    ("cost", "weights", "kwargs", "message"),
    [
        (torch.zeros(2, 2), torch.ones(2, 2), {}, r"\[B, N, M\] .* found shape \[2, 2\]"),
        (torch.zeros(0, 2, 2), torch.ones(0, 2), {}, "nothing empty"),
        (torch.zeros(1, 2, 2).long(), torch.ones(1, 2), {}, "floating point"),
        (torch.zeros(1, 2, 3), torch.ones(1, 2) / 2, {}, r"\[1, 3\] to fit the cost, found \[1, 2\]"),
        (torch.full((1, 2, 1), float("nan")), torch.ones(1, 1), {}, "finite, found nan for sample 0, annotation 0"),
        (torch.full((1, 2, 1), float("inf")), torch.ones(1, 1), {}, "finite, found inf"),
        (torch.zeros(1, 2, 2), torch.tensor([[1.5, -0.5]]), {}, "image 0 hold -0.5"),
        (torch.zeros(1, 2, 2), torch.tensor([[0.5, 0.6]]), {}, "image 0 sum to 1.1"),
        (torch.zeros(1, 4, 1), torch.ones(1, 1), {"capacity": 0.2}, "at least 1/N = 0.25 for 4 samples, found 0.2"),
        (torch.zeros(1, 4, 1), torch.ones(1, 1), {"capacity": 0.249}, "at least 1/N = 0.25"),
        (torch.zeros(1, 4, 1), torch.ones(1, 1), {"capacity": float("nan")}, "capacity must be at least"),
        (torch.zeros(1, 4, 1), torch.ones(1, 1), {"solver": "simplex"}, "one of greedy, exact, released"),
    ],
)
def test_bad_input_is_refused(cost, weights, kwargs, message):
    with pytest.raises(ValueError, match=message):
        couple(cost, weights, **kwargs)


def test_optimal_plan_meets_both_marginals_and_ignores_costs_without_mass():
    cost, v = problem(4, 2, 5, 4)
    u = torch.rand(2, 5, dtype=torch.float64).softmax(1)
    cost[:, 2], u[:, 2] = torch.nan, 0
    u = u / u.sum(1, keepdim=True)
    plan = optimal_plan(cost, u, v)
    assert torch.allclose(plan.sum(2), u)
    assert torch.allclose(plan.sum(1), v)
    kept = [0, 1, 3, 4]
    for b in range(2):
        best = reference.transport_value(cost[b, kept], u[b, kept], v[b])
        assert (plan[b, kept] * cost[b, kept]).sum().item() == pytest.approx(best)


@pytest.mark.parametrize(
    ("cost", "u", "v", "message"),
    [
        (torch.rand(2, 4, 3), torch.zeros(2, 4), torch.zeros(2, 3), "equal sums, found sums 0 and 0"),
        (torch.rand(2, 4, 3), torch.full((2, 3), 1 / 3), torch.full((2, 3), 1 / 3), r"marginals \[B, N\] and \[B, M\]"),
        (torch.rand(1, 2, 1), torch.tensor([[0.5, 0.5]]), torch.tensor([[0.7]]), "equal sums, found sums 1 and 0.7"),
        (torch.rand(1, 2, 1), torch.tensor([[1.5, -0.5]]), torch.tensor([[1.0]]), "non-negative"),
        (torch.full((1, 2, 1), torch.nan), torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0]]), "finite wherever"),
    ],
)
def test_optimal_plan_refuses_what_it_cannot_solve(cost, u, v, message):
    with pytest.raises(ValueError, match=message):
        optimal_plan(cost, u, v)


def test_released_solver_is_greedy_for_equal_weights_with_columns_scaled():
    cost, v = problem(6)
    equal = couple(cost, torch.full_like(v, 0.25), 0.3)
    assert torch.allclose(couple(cost, v, 0.3, "released"), equal * (4 * v)[:, None])
    assert torch.allclose(couple(cost, v, 0.3, "released").sum(1), v)


# -- the relaxed objective, and the paper's propositions -----------------------------------------------------


@given(st.integers(0, 10**6), sizes)
def test_proposition_2_zero_kl_means_optimal_for_the_original_problem(seed, size):
    """Solve for P alone, then set u = P1 (KL = 0): P is feasible and optimal under both marginals (ot.emd2)."""
    cost, v = problem(seed, *size)
    plan = couple(cost, v)
    u = plan.sum(2)
    terms = relaxed_objective(cost, plan, u, beta=3.0)
    assert torch.allclose(terms.kl, torch.zeros_like(terms.kl), atol=1e-12)
    assert torch.allclose(plan.sum(1), v)
    for b in range(size[0]):
        w = u[b].numpy()
        assert terms.total[b].item() == pytest.approx(reference.transport_value(cost[b], w / w.sum(), v[b]), abs=1e-9)


@given(st.integers(0, 10**6), sizes, st.floats(0.1, 5.0))
def test_proposition_1_no_weights_reach_below_the_relaxed_optimum(seed, size, beta):
    """min over (P, u) of the relaxed problem = the original problem at its best u; any other u costs at least that."""
    cost, v = problem(seed, *size)
    plan = couple(cost, v)
    best = relaxed_objective(cost, plan, plan.sum(2), beta).total
    g = torch.Generator().manual_seed(seed)
    other = torch.rand(size[0], size[1], generator=g, dtype=torch.float64).softmax(1)
    assert (relaxed_objective(cost, plan, other, beta).total >= best - 1e-12).all()
    for b in range(size[0]):
        assert reference.transport_value(cost[b], other[b], v[b]) >= best[b].item() - 1e-9


def test_kl_hand_case_at_sample_and_group_level():
    cost = torch.zeros(1, 3, 1)
    plan = torch.tensor([[[0.5], [0.5], [0.0]]])
    u = torch.tensor([[0.25, 0.25, 0.5]])
    assert relaxed_objective(cost, plan, u).kl.item() == pytest.approx(np.log(2))
    merged = relaxed_objective(cost, plan, u, groups=torch.tensor([[0, 0, 2]]))
    assert merged.kl.item() == pytest.approx(np.log(2))
    together = relaxed_objective(cost, plan, u, groups=torch.tensor([[0, 1, 0]]))  # o = (.5, .5), u = (.75, .25)
    assert together.kl.item() == pytest.approx(0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25))
    assert relaxed_objective(cost, plan, u, groups=torch.zeros(1, 3, dtype=torch.long)).kl.item() == pytest.approx(0)


def test_released_scaling_averages_over_the_groups_there_are():
    """The authors' code compares K experts, not K·S samples, once it has grouped them."""
    g = torch.Generator().manual_seed(0)
    u, o = (torch.rand(2, 6, generator=g).softmax(1) for _ in range(2))
    experts = torch.tensor([0, 0, 1, 1, 2, 2]).expand(2, 6)
    found = relaxed_objective(
        torch.zeros(2, 6, 1), o[..., None], u, groups=experts, num_groups=3, scaling="released"
    ).kl
    summed = [x.view(2, 3, 2).sum(2) for x in (u, o)]
    expected = (summed[1] * (summed[1] / (summed[0] + 1e-8)).log()).mean()
    assert found.mean().item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["lidc", "city"])
def test_golden_kl_of_the_released_code(golden, name):
    cost, plan, u = (golden(f"{name}_{key}") for key in ("cost", "coupling_gamma0.25", "sample_weights"))
    released = relaxed_objective(cost, plan, u, scaling="released")
    assert released.kl.mean().item() == pytest.approx(golden(f"{name}_kl_official_mean").item(), abs=1e-6)
    paper = relaxed_objective(cost, plan, u)
    assert paper.kl.mean().item() == pytest.approx(released.kl.mean().item() * u.shape[1], rel=1e-4)


def test_gradients_reach_costs_and_weights_but_not_the_plan():
    cost, v = problem(9)
    cost.requires_grad_()
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    plan = couple(cost, v).requires_grad_()
    relaxed_objective(cost, plan, logits.softmax(1), beta=2.0).total.sum().backward()
    assert cost.grad is not None
    assert logits.grad is not None
    assert torch.allclose(cost.grad, plan.detach())
    assert plan.grad is None
    # d/dlogits of β KL(o ‖ softmax) is β (u − o): a cross-entropy against what each sample received
    assert torch.allclose(logits.grad, 2.0 * (logits.softmax(1) - plan.sum(2)).detach())


def test_a_gate_that_underflowed_keeps_the_loss_finite():
    plan = torch.tensor([[[0.5], [0.5]]])
    terms = relaxed_objective(torch.zeros(1, 2, 1), plan, torch.tensor([[1.0, 0.0]], requires_grad=True))
    terms.total.sum().backward()
    assert terms.total.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": torch.zeros(1, 2, 3)}, r"both be \[B, N, M\]"),
        ({"sample_weights": torch.ones(1, 3)}, r"must be \[1, 2\], found \[1, 3\]"),
        ({"groups": torch.zeros(2, 1, dtype=torch.long)}, "one id a sample"),
        ({"groups": torch.zeros(1, 2)}, "groups must be int64"),
        ({"groups": torch.tensor([[0, 2]])}, "ids from 0 to 1, found 0 to 2"),
        ({"groups": torch.tensor([[0, -1]])}, "ids from 0 to 1, found -1 to 0"),
        ({"sample_weights": torch.tensor([[1.5, -0.5]])}, "sample_weights must be non-negative"),
        ({"sample_weights": torch.tensor([[3.5, 3.5]])}, "image 0 sum to 7"),
        ({"scaling": "official"}, "paper or released, found 'official'"),
    ],
)
def test_bad_objective_inputs_are_refused(change, message):
    good = {"cost": torch.zeros(1, 2, 2), "plan": torch.zeros(1, 2, 2), "sample_weights": torch.ones(1, 2) / 2}
    with pytest.raises(ValueError, match=message):
        relaxed_objective(**{**good, **change})
