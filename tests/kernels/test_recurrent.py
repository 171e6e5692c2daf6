"""Recurrent ops: a row has the same bits however its text is cut into steps and whoever runs beside it; programs give the ops' bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from canter.kernels import bind, native
from canter.kernels.native.program import NativeProgram, new_recorder
from canter.kernels.native.record_recurrent import NUM_REQUESTS
from canter.kernels.ops import OPS
from canter.kernels.recorder import RecordError, Symbol
from canter.kernels.recurrent_inputs import ROW_ARGUMENTS
from canter.kernels.recurrent_plan import RecurrentPlan

DTYPES = (torch.float32, torch.bfloat16)
SCANS = ("causal_conv", "ssd_scan", "selective_scan", "gated_delta")
STATES = {name: OPS[name].mutates[0] for name in SCANS}


def plan(*values: list[int]) -> RecurrentPlan:
    return RecurrentPlan(*(torch.tensor(v, dtype=torch.int32) for v in values))


@dataclass
class Scan:
    """One op on rows of its own making: `run(rows, state, plan)`."""

    op: str
    dtype: torch.dtype
    num_rows: int
    num_slots: int = 12

    def __post_init__(self) -> None:
        self._fn = bind(self.op, "cpu", self.dtype)
        case = OPS[self.op].inputs(torch.Generator().manual_seed(1), self.dtype)[7]
        rng = torch.Generator().manual_seed(2)
        at = STATES[self.op]
        shape = next(value.shape[0] for value in case if isinstance(value, Tensor))
        self._case = [
            torch.randn(self.num_rows, *value.shape[1:], generator=rng).to(value.dtype).abs_().clamp_(max=0.9)
            if isinstance(value, Tensor) and i != at and value.shape[0] == shape
            else value
            for i, value in enumerate(case)
        ]
        self._rows = {i for i, value in enumerate(case) if isinstance(value, Tensor) and i != at and value.shape[0] == shape}
        state = case[at]
        self.state = torch.randn(self.num_slots, *state.shape[1:], generator=rng).to(state.dtype)

    def run(self, rows: list[int], state: Tensor, how: RecurrentPlan) -> Tensor:
        args = [value[rows] if i in self._rows else value for i, value in enumerate(self._case)]
        args[STATES[self.op]] = state
        args = [how if isinstance(value, RecurrentPlan) else value for value in args]
        return self._fn(*args)  # type: ignore[no-any-return]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", SCANS)
@pytest.mark.usefixtures("isa")
def test_a_text_cut_anywhere_gives_the_same_bits(op: str, dtype: torch.dtype) -> None:
    scan = Scan(op, dtype, 50)
    rows = list(range(50))
    whole = scan.state.clone()
    expected = scan.run(rows, whole, plan([0, 3], [17, 18, 50], [4], [7, 8, 9]))
    for cuts in ([*range(1, 51)], [17, 18, 50], [1, 50], [33, 49, 50], [16, 32, 48, 50]):
        state, parts, begin = scan.state.clone(), [], 0
        for end in cuts:
            parts.append(scan.run(rows[begin:end], state, plan([0, 1], [end - begin], [4 if begin == 0 else 11], [11])))
            if end in (17, 18):
                assert same_bits(state[11], whole[7 if end == 17 else 8])
            begin = end
        assert same_bits(torch.cat(parts), expected) and same_bits(state[11], whole[9]), cuts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", SCANS)
@pytest.mark.usefixtures("isa")
def test_a_request_does_not_depend_on_its_company(op: str, dtype: torch.dtype) -> None:
    scan = Scan(op, dtype, 60)
    texts = [list(range(0, 1)), list(range(1, 38)), list(range(38, 40)), list(range(40, 60))]
    alone, states = [], []
    for text, slot in zip(texts, (0, -1, 2, 3), strict=True):
        state = scan.state.clone()
        alone.append(scan.run(text, state, plan([0, 1], [len(text)], [slot], [11])))
        states.append(state[11])
    order = [2, 0, 3, 1]
    ends = torch.tensor([len(texts[i]) for i in order]).cumsum(0).tolist()
    state = scan.state.clone()
    together = scan.run([row for i in order for row in texts[i]], state, plan([0, 1, 2, 3, 4], ends, [2, 0, 3, -1], [5, 6, 7, 8]))
    for part, slot, i in zip(together.split([len(texts[i]) for i in order]), (5, 6, 7, 8), order, strict=True):
        assert same_bits(part, alone[i]) and same_bits(state[slot], states[i])
    assert same_bits(state[:5], scan.state[:5]) and same_bits(state[9:], scan.state[9:])


@pytest.mark.parametrize("op", SCANS)
@pytest.mark.usefixtures("restored_threads")
def test_threads_change_nothing(op: str) -> None:
    scan = Scan(op, torch.float32, 200)
    how = plan([0, 1, 2], [150, 200], [-1, 3], [3, 4])
    native.set_num_threads(1)
    expected_state = scan.state.clone()
    expected = scan.run(list(range(200)), expected_state, plan([0, 1, 2], [150, 200], [-1, 3], [5, 4]))
    native.set_num_threads(3)
    state = scan.state.clone()
    assert how.num_requests == 2
    assert same_bits(scan.run(list(range(200)), state, plan([0, 1, 2], [150, 200], [-1, 3], [5, 4])), expected)
    assert same_bits(state, expected_state)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 2**31))
def test_snapshots_are_the_states_of_shorter_texts(lengths: list[int], seed: int) -> None:
    scan = Scan("gated_delta", torch.float32, sum(lengths))
    rows = list(range(sum(lengths)))
    ends = torch.tensor([0, *lengths]).cumsum(0)[1:].tolist()
    state = scan.state.clone()
    scan.run(rows, state, plan([0, len(ends)], ends, [seed % 4 - 1], [5 + i for i in range(len(ends))]))
    for i, end in enumerate(ends):
        shorter = scan.state.clone()
        scan.run(rows[:end], shorter, plan([0, 1], [end], [seed % 4 - 1], [5]))
        assert same_bits(shorter[5], state[5 + i])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (plan([0, 1], [4], [12], [0]), "slot 12"),
        (plan([0, 1], [4], [0], [12]), "slot 12"),
        (plan([0, 1], [5], [0], [0]), "within the rows"),
        (plan([0, 2], [3, 2], [0], [0, 1]), "in order"),
        (plan([1, 1], [4], [0], [0]), "begin at 0"),
        (plan([0, 2], [4], [0], [0]), "recurrent plan"),
    ],
)
def test_plans_that_do_not_fit_are_refused(how: RecurrentPlan, message: str) -> None:
    scan = Scan("ssd_scan", torch.float32, 4)
    with pytest.raises(ValueError, match=message):
        scan.run([0, 1, 2, 3], scan.state.clone(), how)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", (*SCANS, "l2_norm", "decay_gate", "gated_rms_norm"))
def test_programs_give_the_bits_of_the_ops(op: str, dtype: torch.dtype) -> None:
    fn = bind(op, "cpu", dtype)
    cases = [case for case in OPS[op].inputs(torch.Generator().manual_seed(5), dtype) if case[0].shape[0] > 1]
    for case in cases:
        rows, at = case[0].shape[0], OPS[op].mutates[0] if OPS[op].mutates else -1
        given = [value.clone() if i == at else value for i, value in enumerate(case)]
        expected = fn(*given)
        recorder = new_recorder()
        addresses: dict[str, int] = {NUM_REQUESTS: 0}
        kept: list[Any] = []

        def symbol(name: str, value: Tensor, recorder: Any = recorder, addresses: Any = addresses, kept: Any = kept) -> Symbol:
            kept.append(value.contiguous())
            addresses[name] = kept[-1].data_ptr()
            return recorder.given(name, value.dtype, *value.shape[1:])  # type: ignore[no-any-return]

        recorded: list[Any] = []
        state = case[at].clone() if at >= 0 else None
        for i, value in enumerate(case):
            if i == at:
                recorded.append(state)
            elif isinstance(value, RecurrentPlan):
                addresses[NUM_REQUESTS] = value.num_requests
                recorded.append(RecurrentPlan(*(symbol(f"plan{j}", t) for j, t in enumerate(value.tensors))))  # type: ignore[arg-type]
            elif isinstance(value, Tensor) and i in ROW_ARGUMENTS[op]:
                recorded.append(symbol(f"x{i}", value))
            else:
                recorded.append(value)
        program = NativeProgram(recorder, fn(*recorded))
        assert same_bits(program.run(rows, [addresses[slot.name] for slot in recorder.slots]), expected)
        assert state is None or same_bits(state, given[at])


def test_recordings_refuse_what_they_could_not_hold() -> None:
    recorder = new_recorder()
    x = recorder.given("x", torch.float32, 8)
    how = RecurrentPlan(*(recorder.given(f"plan{i}", torch.int32) for i in range(4)))  # type: ignore[arg-type]
    conv = bind("causal_conv", "cpu", torch.float32)
    with pytest.raises(RecordError, match="taps"):
        conv(x, torch.zeros(9, 8), None, torch.zeros(3, 8, 8), how)
    with pytest.raises(RecordError, match="state"):
        conv(x, torch.zeros(4, 8), None, torch.zeros(3, 4, 8), how)
    with pytest.raises(RecordError, match="plan of the step"):
        conv(x, torch.zeros(4, 8), None, torch.zeros(3, 3, 8), plan([0, 1], [1], [0], [0]))


def test_the_gated_delta_rule_is_that_of_transformers() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

    rng = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 150, 2, 24, generator=rng) for _ in range(2))
    v, g, beta = torch.randn(1, 150, 2, 20, generator=rng), -torch.rand(1, 150, 2, generator=rng), torch.randn(1, 150, 2, generator=rng)
    fns: tuple[Callable[..., Any], ...] = (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule)
    norm, scan = bind("l2_norm", "cpu", torch.float32), bind("gated_delta", "cpu", torch.float32)
    state = torch.zeros(2, 2, 24, 20)
    keys = norm(q[0], 1e-6, 24**-0.5), norm(k[0], 1e-6)
    found = scan(*keys, v[0], g[0].exp()[..., None], beta[0], state, plan([0, 1], [150], [-1], [1]))
    for fn in fns:
        expected, last = fn(q, k, v, g, beta.sigmoid(), initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True)
        torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state[1], last[0], rtol=1e-4, atol=1e-4)


def test_kimi_delta_attention_is_the_rule_with_a_decay_for_each_channel() -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import (
        KimiLinearRMSNormGated,
        chunk_kimi_delta_attention,
        recurrent_kimi_delta_attention,
    )

    rng = torch.Generator().manual_seed(0)
    q, k, v, x, z = (torch.randn(1, 150, 3, 32, generator=rng) for _ in range(5))
    beta = torch.randn(1, 150, 3, generator=rng)
    slopes, bias = -torch.rand(3, generator=rng) - 0.1, torch.randn(3, 32, generator=rng)
    norm, decay, scan = (bind(name, "cpu", torch.float32) for name in ("l2_norm", "decay_gate", "gated_delta"))
    stays = decay(x[0], slopes, bias)
    state = torch.zeros(3, 3, 32, 32)
    keys = norm(q[0], 1e-6, 32**-0.5), norm(k[0], 1e-6)
    found = scan(*keys, v[0], stays, beta[0], state, plan([0, 2], [99, 150], [-1], [1, 2]))
    given = q, k, v, slopes[:, None] * torch.nn.functional.softplus(x + bias), beta.sigmoid()
    for fn in (chunk_kimi_delta_attention, recurrent_kimi_delta_attention):
        expected, last = fn(*given, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True)
        torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state[2], last[0], rtol=1e-4, atol=1e-4)
    gated_norm = KimiLinearRMSNormGated(32, 1e-5)
    torch.nn.init.normal_(gated_norm.weight)
    out = bind("gated_rms_norm", "cpu", torch.float32)(found.flatten(1), z[0].flatten(1), gated_norm.weight.detach(), 1e-5, 32, False, True)
    torch.testing.assert_close(out.unflatten(1, (3, 32)), gated_norm(found, z[0]).detach(), rtol=1e-5, atol=1e-5)


def test_lightning_attention_is_a_scan_with_a_constant_decay() -> None:
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(70, 4, 24, generator=rng) for _ in range(3))
    slopes = 2.0 ** -torch.arange(1, 5)
    distance = (torch.arange(70)[:, None] - torch.arange(70)).float()
    weights = torch.exp(-slopes[:, None, None] * distance).masked_fill(distance < 0, 0)
    expected = torch.einsum("hts,thd,shd,she->the", weights, q, k, v)
    scan, state = bind("ssd_scan", "cpu", torch.float32), torch.zeros(3, 4, 24, 24)
    found = scan(v, None, None, -slopes, k, q, None, state, plan([0, 2], [64, 70], [-1], [1, 2]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    after = torch.exp(-slopes[None] * (63 - torch.arange(64.0))[:, None])
    torch.testing.assert_close(state[1], torch.einsum("sh,shd,she->hde", after, k[:64], v[:64]), rtol=1e-4, atol=1e-4)


def test_the_short_convolution_of_lfm2_is_a_gated_causal_conv() -> None:
    rng = torch.Generator().manual_seed(0)
    b, c, x = torch.randn(40, 3 * 1024, generator=rng).chunk(3, 1)
    weight = torch.randn(3, 1024, generator=rng)
    padded = torch.nn.functional.pad((b * x).T[None], (2, 0))
    expected = c * torch.nn.functional.conv1d(padded, weight.T[:, None], groups=1024)[0].T
    conv, state = bind("causal_conv", "cpu", torch.float32), torch.zeros(2, 2, 1024)
    found = conv(x, weight, None, state, plan([0, 1], [40], [-1], [1]), False, b, c)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(state[1], (b * x)[-2:])


def test_gated_norms_are_those_of_transformers() -> None:
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
    from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

    rng = torch.Generator().manual_seed(0)
    x, z = (torch.randn(9, 96, generator=rng) * 3 for _ in range(2))
    norm = bind("gated_rms_norm", "cpu", torch.float32)
    expected: tuple[tuple[Any, int, bool], ...] = (
        (MambaRMSNormGated(96, 96, 1e-5), 96, True),
        (Zamba2RMSNormGated(96, 32, 1e-5), 32, True),
        (FalconH1RMSNormGated(96, 1e-5, n_groups=3, norm_before_gate=False), 32, True),
        (FalconH1RMSNormGated(96, 1e-5, n_groups=3, norm_before_gate=True), 32, False),
        (Qwen3NextRMSNormGated(32, 1e-5), 32, False),
    )
    for module, group, gate_first in expected:
        torch.nn.init.normal_(module.weight)
        shape = (9, 3, 32) if module.weight.shape[0] == 32 else (9, 96)
        theirs = module(x.view(shape), z.view(shape)).detach().reshape(9, 96)
        torch.testing.assert_close(norm(x, z, module.weight.detach(), 1e-5, group, gate_first), theirs, rtol=1e-5, atol=1e-5)
