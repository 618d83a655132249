import getpass
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.callback import CallbackTrigger, callback_handler
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_wlb.models import compiled_functions, loss
from lightning_wlb.models.compiled_functions import (
    BlockFunctions,
    CompiledFunction,
)
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.models.transformer import Transformer
from tests.models.steps import config, documents, spread, step_batch
from tests.oracle import oracle, relative_error

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler is installed"
)


def build(dtype=torch.float64, **overrides):
    # As many key heads as heads: one graph less to compile.
    return spread(Transformer(config(**{"kv_heads": 4} | overrides)).to(dtype))


def other_parameters(model):
    """Other tensors of the same values, as a step's gathered ones are."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            setattr(module, name, torch.nn.Parameter(parameter.detach().clone()))


def graphs():
    return counters["stats"]["unique_graphs"]


@needs_compiler
def test_gradients_and_few_compilations_whatever_the_lengths():
    model, plain = build(), build()
    model.compile_blocks()
    before = graphs()
    for step, length in enumerate((2, 5, 17, 35)):
        texts, pieces = documents([length, 5]), [(0, 0, length), (1, 0, 5)]
        _, wanted = oracle(plain, texts, pieces)
        recompute = ("none", "selective", "full")[step % 3]
        other_parameters(model)
        for micro_batch in step_batch(texts, [pieces], recompute=(recompute,)).micro_batches:
            model(micro_batch).backward()
        for name, parameter in model.named_parameters():
            assert relative_error(parameter.grad, wanted[name]) <= 1e-10, (name, length)
    assert graphs() - before == 5, "norm, rotation, SwiGLU, and two of the loss, each once"


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return operator(*args, **(kwargs or {}))


@pytest.fixture
def compiled(monkeypatch):
    """What torch.compile would be given is collected, and not compiled."""
    calls = []

    def fake(function, **options):
        def run(*args):
            calls.append((function, options))
            return function(*args)

        return run

    monkeypatch.setattr(torch, "compile", fake)
    return calls


def test_one_row_or_none_and_what_a_mode_looks_at_run_uncompiled(compiled):
    double = CompiledFunction(lambda x: 2 * x)
    for rows in (0, 1):
        assert double(torch.ones(rows)).shape == (rows,)
    with Nothing():
        double(torch.ones(3))
    assert not compiled
    assert double(torch.ones(3)).tolist() == [2, 2, 2]
    ((_, options),) = compiled
    assert options == {"fullgraph": True, "dynamic": False, "options": None}
    torch.use_deterministic_algorithms(True)
    try:
        CompiledFunction(torch.neg)(torch.ones(3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert compiled[-1][1]["options"] == {"deterministic": True}


def broken(x):
    torch._dynamo.graph_break()
    return x + 1


def test_what_cannot_be_compiled_is_refused_with_the_remedy():
    with pytest.raises(RuntimeError, match=r"fails on broken: Unsupported: .*set compile=False"):
        CompiledFunction(broken)(torch.ones(2))
    model = build(torch.float32, layers=1)
    model.compile_blocks()
    (micro_batch, *_) = step_batch(documents()).micro_batches
    without = {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}
    with (
        torch._inductor.config.patch(without),
        pytest.raises(RuntimeError, match=r"InvalidCxxCompiler: .*missing, install one"),
    ):
        model(micro_batch)


def test_errors_of_the_function_itself_are_raised():
    product = CompiledFunction(torch.mm)
    with pytest.raises(RuntimeError, match=r"expected|shapes|size"):
        product(torch.ones(2, 3), torch.ones(2, 3))


def test_the_module_compiles_the_blocks_and_says_so_in_its_hyperparameters(compiled):
    module = LanguageModule(config(), compile=True, seed=1)
    assert module.hparams.compile is True
    module.configure_model()
    (micro_batch, *_) = step_batch(documents()).micro_batches
    module.model(micro_batch).backward()
    names = {function.__name__ for function, _ in compiled}
    of_loss = {"_log_sum_exp_at_once", "logits_gradient_at_once"}
    assert names == {"rms_norm", "rotate_real", "swiglu"} | of_loss
    # Both norms of both layers and the last one; queries and keys; the feed-forward networks.
    assert len(compiled) == 5 + 4 + 2 + 2
    compiled.clear()
    plain = LanguageModule(config(), seed=1)
    plain.configure_model()
    plain.model(micro_batch)
    assert not compiled


def test_a_model_that_compiles_nothing_is_refused():
    class Own(LanguageModule):
        def build_model(self):
            return Decoder()

    with pytest.raises(ValueError, match="compile=True, but Decoder does not compile anything"):
        Own(compile=True).configure_model()
    with pytest.raises(ValueError, match="compile='yes'"):
        LanguageModule(compile="yes")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_compiled_functions_equal_the_plain_ones_on_a_gpu(dtype, most):
    check_functions("cuda", getattr(torch, dtype), most)


def check_functions(device, dtype, most):
    generator = torch.Generator().manual_seed(0)
    rows, dim, heads, inner = 1000, 256, 4, 384

    def draw(*shape, scale=0.1):
        values = scale * torch.randn(*shape, generator=generator)
        return values.to(device, dtype).requires_grad_()

    hidden, angles = draw(rows, dim, scale=1.0), torch.rand(rows, dim // heads // 2)
    table = torch.stack([angles.cos(), angles.sin()], -1).to(device)
    own = [draw(rows, heads, dim // heads), draw(rows, inner), draw(rows, inner)]
    calls = {
        "rms_norm": (hidden, draw(dim), 1e-5),
        "rotate": (own[0], table),
        "swiglu": own[1:],
    }
    plain, compiled = BlockFunctions(), BlockFunctions.compiled()
    for name, given in calls.items():
        leaves = [each for each in given if isinstance(each, torch.Tensor) and each.requires_grad]
        results = []
        for functions in (plain, compiled):
            out = getattr(functions, name)(*given)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for value, wanted in zip(*results, strict=True):
            assert relative_error(value.detach(), wanted.detach()) <= most, name
    weight, labels = draw(512, dim), torch.arange(rows, device=device) % 512
    results = []
    for functions in (plain, compiled):
        total = loss.token_loss(hidden, weight, labels, None, functions.softmax)
        results.append([total, *torch.autograd.grad(total, (hidden, weight))])
    for value, wanted in zip(*results, strict=True):
        assert relative_error(value.detach(), wanted.detach()) <= most


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners")
@torch._inductor.config.patch(cpp_cache_precompile_headers=True)
def test_no_folder_of_another_user_is_the_compilers_cache(tmp_path, monkeypatch):
    # A link is what another user could put there without being root.
    (tmp_path / "theirs").mkdir()
    link = tmp_path / f"torchinductor_{getpass.getuser()}"
    link.symlink_to(tmp_path / "theirs")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(link))  # as torch sets it
    compiled = CompiledFunction(torch.sin)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    compiled(torch.ones(4))
    # At each compilation, of which torch tells: a folder may have been removed since the last one.
    for named in (link, link, link / "job1"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(named))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(link / "triton" / "0"))  # as torch derives it
        torch._inductor.config.cpp_cache_precompile_headers = True
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0"):
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path / "cache"))
            assert "TRITON_CACHE_DIR" not in os.environ
        assert not torch._inductor.config.cpp_cache_precompile_headers
    assert callback_handler.start_callbacks.count(compiled_functions._use_own_cache) == 1


@torch._inductor.config.patch(cpp_cache_precompile_headers=True)
def test_no_code_of_a_strangers_runs_before_a_compilation(scratch, monkeypatch):
    """torch.compile itself looks for a bisection of its compiler."""
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("XDG_CACHE_HOME", str(scratch.parent / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    theirs = scratch / f"torchinductor_{getpass.getuser()}"
    (theirs / "bisect/inductor").mkdir(parents=True)
    (theirs / "bisect/bisect_status.txt").write_text("backend=inductor\nsubsystem=x\n")
    code = f"fallback_random=bool(open({str(scratch / 'ran')!r}, 'w'))\n"
    (theirs / "bisect/inductor/x_config.txt").write_text(code)
    os.chown(theirs, 65534, 65534)
    torch.compiler.reset()
    compiled = CompiledFunction(torch.sin)
    assert torch.equal(compiled(torch.ones(4)), torch.ones(4).sin())
    assert not (scratch / "ran").exists()
    torch.compiler.reset()


@pytest.mark.parametrize("before", [None, "0"])
def test_what_a_compilation_starts_imports_nothing_from_the_working_folder(before, monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONSAFEPATH", before)
    torch.compiler.reset()
    seen: list[str | None] = []
    callback_handler.register_end_callback(lambda _: seen.append(os.environ.get("PYTHONSAFEPATH")))
    value = CompiledFunction(compiled_functions.swiglu, 2)(*torch.ones(2, 4, 8, requires_grad=True))
    assert seen == ["1"]
    assert os.environ.get("PYTHONSAFEPATH") == before
    value.sum().backward()  # some backwards are compiled when they begin
    assert set(seen) == {"1"}
    assert os.environ.get("PYTHONSAFEPATH") == before
    torch.compiler.reset()


@torch._inductor.config.patch(cpp_cache_precompile_headers=True)
def test_a_cache_that_the_environment_names_is_this_users_too(tmp_path, monkeypatch):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for each in (mine, theirs):
        each.mkdir()
    stat = Path.stat

    def owned(path: Path, **options: Any) -> Any:
        found = stat(path, **options)
        uid = found.st_uid + 9999 * (path.name == "theirs")
        return SimpleNamespace(st_uid=uid, st_mode=found.st_mode)

    monkeypatch.setattr(Path, "stat", owned)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"torchinductor_{getpass.getuser()}").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(mine))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(mine))
    compiled_functions._use_own_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == os.environ["TRITON_CACHE_DIR"] == str(mine)
    assert not torch._inductor.config.cpp_cache_precompile_headers, "they are in torch's own folder"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(theirs))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(theirs))
    with pytest.warns(UserWarning, match=r"_CACHE_DIR is not used: .*theirs belongs to") as said:
        compiled_functions._use_own_cache()
    assert len(said) == 2
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path / "cache"))
    assert "TRITON_CACHE_DIR" not in os.environ


@torch._inductor.config.patch(cpp_cache_precompile_headers=True)
def test_a_cache_in_a_folder_that_a_stranger_has_made_is_not_used(scratch, monkeypatch):
    """Who could exchange it once something lies in it."""
    monkeypatch.setattr(tempfile, "tempdir", str(scratch.parent))
    for named, strange in (("theirs/in", "theirs"), ("leads/in", "leads"), ("leads/new", "leads")):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(scratch / named))
        with pytest.warns(UserWarning, match=f"_DIR is not used: {scratch / strange}, which leads"):
            compiled_functions._use_own_cache()
        assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ, "torch's default is this user's"
    assert not (scratch.parent / "home/new").exists()
