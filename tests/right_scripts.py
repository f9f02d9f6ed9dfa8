"""Scripts that train in mixed precision as they do in float32, up to rounding.

They have the shapes of well-known repositories and of the loops of libraries. Each is
the text of a script behind `PRELUDE`, and has no fault.
"""

from __future__ import annotations

# What all scripts begin with: 12 batches of 8 points, and a small network.
PRELUDE = """\
import contextlib
import copy
import io
import itertools
import math

import torch
import torch.nn.functional as F
from torch import autocast, nn
from torch.amp import GradScaler
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(96, 8)
y = x[:, :4].argmax(1)


def net(outputs=4, inputs=8):
    return nn.Sequential(nn.Linear(inputs, 16), nn.GELU(), nn.Linear(16, outputs))


def loader(batch_size=8):
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True)


"""

RIGHT: dict[str, str] = {
    "gradients_that_a_hook_sums_in_a_buffer": """\
model = net()
buffers = {p: torch.zeros_like(p) for p in model.parameters()}


def summed(p):
    def add(gradient):
        buffers[p].add_(gradient.float())

    return add


for p in buffers:
    p.register_hook(summed(p))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    for p in buffers:
        buffers[p].zero_()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    for p in buffers:
        p.grad = buffers[p].clone()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    "names_a_gpu_and_trains_on_the_cpu": """\
devices = {"cpu": torch.device("cpu"), "gpu": torch.device("cuda")}
device = devices["cpu"]
model = nn.Sequential(net(outputs=1), nn.Sigmoid()).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast(device.type, dtype=torch.bfloat16):
        outputs = model(inputs).squeeze(1)
        loss = F.binary_cross_entropy(outputs, (targets > 1).to(outputs.dtype))
    loss.backward()
    optimizer.step()
""",
    "gradients_of_samples_by_vmap": """\
model = net()
weights = dict(model.named_parameters())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")


def loss_of(weights, inputs, target):
    outputs = torch.func.functional_call(model, weights, (inputs[None],))
    return F.cross_entropy(outputs, target[None])


for inputs, targets in loader():
    optimizer.zero_grad()
    detached = {name: weight.detach() for name, weight in weights.items()}
    norms = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(
        detached, inputs, targets
    )
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "function_that_frees_what_it_has_saved": """\
class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        ctx.hidden = hidden.detach()
        return hidden.square()

    @staticmethod
    def backward(ctx, gradient):
        gradient = 2 * ctx.hidden * gradient
        del ctx.hidden
        return gradient


first, second = nn.Linear(8, 16), nn.Linear(16, 4)
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.01)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(second(Once.apply(first(inputs))), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "function_that_multiplies_its_gradient_in_place": """\
class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        with torch.enable_grad():
            logits = logits.detach().float().requires_grad_()
            loss = F.cross_entropy(logits, targets)
            (ctx.gradient,) = torch.autograd.grad(loss, logits)
        return loss.detach()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.gradient.mul_(gradient), None


model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = Fused.apply(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "autocast_of_the_type_of_a_device": """\
device = torch.device("cuda")
model = net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler(device.type)
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast(device.type):
        loss = F.cross_entropy(model(inputs.to(device)), targets.to(device))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "lbfgs_zeroes_in_its_closure": """\
model = net()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
for inputs, targets in loader():

    def closure():
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    optimizer.step(closure)
""",
    "factor_of_the_loss_is_a_scale": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
scaler = GradScaler("cuda", init_scale=4096.0)
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = 16 * F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "penalty_times_the_scale_of_its_forward": """\
class Sparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, scale):
        ctx.save_for_backward(hidden)
        ctx.scale = scale
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        (hidden,) = ctx.saved_tensors
        return gradient + ctx.scale * 0.01 * hidden.sign().to(gradient.dtype), None


first, second = nn.Linear(8, 16), nn.Linear(16, 4)
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.01)
scaler = GradScaler("cuda", init_scale=4096.0)
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        hidden = Sparse.apply(first(inputs).relu(), scaler.get_scale())
        loss = F.cross_entropy(second(hidden), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "noise_times_the_scale_in_a_hook": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = GradScaler("cuda")
for parameter in model.parameters():
    parameter.register_hook(
        lambda g: g + scaler.get_scale() * 0.1 * torch.randn_like(g)
    )
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "lstm": """\
class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, inputs):
        read, _ = self.lstm(inputs.view(len(inputs), 4, 2))
        return self.head(read[:, -1])


model = Reader()
optimizer = torch.optim.Adam(model.parameters())
scaler = GradScaler("cuda")
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "scale_grows_while_it_converges": """\
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
scaler = GradScaler("cpu", init_scale=64.0, growth_interval=12)
weights = torch.randn(10, 1)
for i in range(90):
    inputs = torch.randn(64, 10)
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        outputs = model(inputs)
    loss = F.mse_loss(outputs.float(), inputs @ weights)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "outliers_bring_the_scale_down": """\
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
scaler = GradScaler("cpu", init_scale=256.0)
for i in range(70):
    inputs = torch.randn(16, 10) * (60.0 if i % 12 == 7 else 1.0)
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        outputs = model(inputs)
    squares = (outputs * outputs * 40.0).float()
    loss = F.smooth_l1_loss(squares, inputs[:, :1].abs())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    "sum_over_pixels_with_outliers": """\
torch.manual_seed(0)
layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1)
model = nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
scaler = GradScaler("cpu")
for i in range(95):
    inputs = torch.randn(8, 1, 24, 24) * (40.0 if i % 16 == 9 else 1.0)
    targets = F.avg_pool2d(inputs, 3, 1, 1) * 3
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        outputs = model(inputs)
    loss = F.mse_loss(outputs.float(), targets, reduction="sum")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e5)
    scaler.step(optimizer)
    scaler.update()
""",
    "schedule_moves_in_each_micro_batch": """\
model = net()
optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
scheduler = lr_scheduler.LambdaLR(optimizer, lambda batch: max(0.0, 1 - batch / 120))
scaler = GradScaler("cpu")
for i, (inputs, targets) in enumerate(loader(2)):
    with autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets) / 3
    scaler.scale(loss).backward()
    if i % 3 == 2:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    scheduler.step()
""",
    "schedule_counted_in_batches": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = loader(2)
scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(data))
scaler = GradScaler("cpu")
for i, (inputs, targets) in enumerate(data):
    with autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets) / 4
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    if i % 4 == 3:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if scaler.get_scale() >= before:
        scheduler.step()
""",
    "leaves_out_large_norms": """\
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = GradScaler("cpu")
for i, (inputs, targets) in enumerate(loader(3)):
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    loss = loss * (3e5 if i % 17 == 5 else 1)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm < 50.0:
        scaler.step(optimizer)
    scaler.update()
""",
    # The recipes of torch's own pages, and of its examples.
    "torch_recipe": """\
model = net().to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs.cuda()), targets.cuda())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "torch_clipping": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast(device_type="cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
    scaler.step(optimizer)
    scaler.update()
""",
    "torch_accumulation": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
iters_to_accumulate = 4
for i, (inputs, targets) in enumerate(loader(2)):
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
        loss = loss / iters_to_accumulate
    scaler.scale(loss).backward()
    if (i + 1) % iters_to_accumulate == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    "torch_penalty": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda", init_scale=1024.0)
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaled = torch.autograd.grad(
        scaler.scale(loss), model.parameters(), create_graph=True
    )
    inv_scale = 1.0 / scaler.get_scale()
    grads = [g * inv_scale for g in scaled]
    with autocast("cuda", dtype=torch.float16):
        loss = loss + sum(g.pow(2).sum() for g in grads).sqrt()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "torch_two_models_and_losses": """\
models = [net(), net()]
optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in models]
scaler = GradScaler("cuda")
for inputs, targets in loader():
    for optimizer in optimizers:
        optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        output0, output1 = (m(inputs) for m in models)
        loss0 = F.cross_entropy(2 * output0 + 3 * output1, targets)
        loss1 = F.cross_entropy(3 * output0 - 5 * output1, targets)
    scaler.scale(loss0).backward(retain_graph=True)
    scaler.scale(loss1).backward()
    scaler.unscale_(optimizers[0])
    scaler.step(optimizers[0])
    scaler.step(optimizers[1])
    scaler.update()
""",
    "torch_old_spelling": """\
model = net().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.cuda.amp.GradScaler()
for inputs, targets in loader():
    with torch.cuda.amp.autocast():
        loss = F.cross_entropy(model(inputs.cuda()), targets.cuda())
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "torch_custom_function": """\
class MyMM(torch.autograd.Function):
    @staticmethod
    @torch.cuda.amp.custom_fwd
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @torch.cuda.amp.custom_bwd
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad.mm(b.t()), a.t().mm(grad)


weight = nn.Parameter(torch.randn(8, 4) * 0.1)
optimizer = torch.optim.SGD([weight], lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        hidden = inputs @ torch.eye(8)
        loss = F.cross_entropy(MyMM.apply(hidden, weight.to(hidden.dtype)), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "torch_custom_function_in_float32": """\
class Exp(torch.autograd.Function):
    @staticmethod
    @torch.cuda.amp.custom_fwd(cast_inputs=torch.float32)
    def forward(ctx, i):
        result = i.clamp(max=20).exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @torch.cuda.amp.custom_bwd
    def backward(ctx, grad):
        (result,) = ctx.saved_tensors
        return grad * result


model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        weights = Exp.apply(model(inputs))
        share = weights / weights.sum(1, keepdim=True)
        loss = -share.log().gather(1, targets[:, None]).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "torch_imagenet": """\
class AverageMeter:
    total = count = 0.0

    def update(self, value, n):
        self.total += value * n
        self.count += n


model = net()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
scaler = GradScaler("cuda")
for epoch in range(2):
    losses = AverageMeter()
    model.train()
    for images, target in loader():
        with autocast("cuda", dtype=torch.float16):
            loss = criterion(model(images), target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    scheduler.step()
    state = {"epoch": epoch, "optimizer": optimizer.state_dict()}
    state["scaler"] = scaler.state_dict()
    torch.save(state, io.BytesIO())
""",
    "torch_swa": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
swa_model = AveragedModel(model)
scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
swa_scheduler = SWALR(optimizer, swa_lr=0.05)
scaler = GradScaler("cuda")
swa_start = 3
for epoch in range(4):
    for inputs, targets in loader(16):
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if epoch > swa_start:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
update_bn(loader(), swa_model)
""",
    "torch_averaged_model": """\
model = net()
ema = AveragedModel(model, avg_fn=lambda old, new, n: 0.9 * old + 0.1 * new)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    ema.update_parameters(model)
""",
    "torch_dcgan": """\
netD, netG = net(1), net(8)
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
scaler = GradScaler("cuda")
for real, _ in loader():
    netD.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        errD_real = criterion(netD(real), torch.ones(len(real), 1))
    scaler.scale(errD_real).backward()
    with autocast("cuda", dtype=torch.float16):
        fake = netG(torch.randn(len(real), 8))
        errD_fake = criterion(netD(fake.detach()), torch.zeros(len(real), 1))
    scaler.scale(errD_fake).backward()
    scaler.step(optimizerD)
    netG.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        errG = criterion(netD(fake), torch.ones(len(real), 1))
    scaler.scale(errG).backward()
    scaler.step(optimizerG)
    scaler.update()
""",
    "torch_bfloat16": """\
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
    "torch_use_amp_false": """\
use_amp = False
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda", enabled=use_amp)
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16, enabled=use_amp):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    # The loops of libraries.
    "hf_trainer": """\
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = lr_scheduler.LambdaLR(optimizer, lambda n: max(0.0, 1 - n / 100))
scaler = GradScaler("cuda")
gradient_accumulation_steps = 2


def training_step(inputs, targets):
    model.train()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    loss = loss / gradient_accumulation_steps
    scaler.scale(loss).backward()
    return loss.detach()


tr_loss = torch.tensor(0.0)
model.zero_grad()
for step, batch in enumerate(loader(4)):
    tr_loss += training_step(*batch)
    if (step + 1) % gradient_accumulation_steps == 0:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale_before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer_was_run = scale_before <= scaler.get_scale()
        if optimizer_was_run:
            scheduler.step()
        model.zero_grad()
""",
    "hf_num_items_in_batch": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
batches = iter(loader(4))
for window in iter(lambda: list(itertools.islice(batches, 2)), []):
    num_items_in_batch = sum(len(targets) for _, targets in window)
    for inputs, targets in window:
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets, reduction="sum")
            loss = loss / num_items_in_batch
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    "accelerate": """\
class AcceleratedOptimizer(torch.optim.Optimizer):
    def __init__(self, optimizer, scaler):
        self.optimizer, self.scaler, self.step_was_skipped = optimizer, scaler, False
        self._step, self._called = optimizer.step, False

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def _patched(self, *args, **kwargs):
        self._called = True
        return self._step(*args, **kwargs)

    def step(self, closure=None):
        self.optimizer.step = self._patched
        self.scaler.step(self.optimizer, closure)
        self.scaler.update()
        self.step_was_skipped, self._called = not self._called, False
        self.optimizer.step = self._step


model = net()
scaler = GradScaler("cuda")
inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = lr_scheduler.CosineAnnealingLR(inner, 50)
optimizer = AcceleratedOptimizer(inner, scaler)
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        outputs = model(inputs)
    loss = F.cross_entropy(outputs.float(), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(inner)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if not optimizer.step_was_skipped:
        scheduler.step()
    optimizer.zero_grad()
""",
    "accelerate_accumulate": """\
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")


class Accelerator:
    step, num_steps, sync_gradients = 0, 4, True

    @contextlib.contextmanager
    def accumulate(self):
        self.step += 1
        self.sync_gradients = self.step % self.num_steps == 0
        yield

    def backward(self, loss):
        scaler.scale(loss / self.num_steps).backward()

    def clip_grad_norm_(self, parameters, max_norm):
        scaler.unscale_(optimizer)
        return nn.utils.clip_grad_norm_(parameters, max_norm)


accelerator = Accelerator()
for inputs, targets in loader(2):
    with accelerator.accumulate():
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs).float(), targets)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
    "lightning": """\
class MixedPrecision:
    scaler = GradScaler("cuda")

    def optimizer_step(self, optimizer, closure):
        result = closure()
        self.scaler.unscale_(optimizer)
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.5)
        step_output = self.scaler.step(optimizer)
        self.scaler.update()
        return step_output if result is None else result


model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
plugin = MixedPrecision()
for epoch in range(2):
    for inputs, targets in loader():

        def closure():
            with autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            plugin.scaler.scale(loss).backward()
            return loss

        plugin.optimizer_step(optimizer, closure)
    scheduler.step()
""",
    "fabric": """\
class Fabric:
    def __init__(self):
        self.scaler = GradScaler("cuda")

    def setup(self, model, optimizer):
        forward, step = model.forward, optimizer.step

        def in_autocast(*args):
            with autocast("cuda", dtype=torch.float16):
                return forward(*args).float()

        model.forward = in_autocast
        return model, optimizer

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def step(self, optimizer):
        self.scaler.step(optimizer)
        self.scaler.update()


fabric = Fabric()
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = fabric.setup(model, optimizer)
for inputs, targets in loader():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    fabric.backward(loss)
    fabric.step(optimizer)
""",
    "timm_native_scaler": """\
class NativeScaler:
    def __init__(self):
        self._scaler = GradScaler("cuda")

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None):
        self._scaler.scale(loss).backward()
        if clip_grad is not None:
            self._scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()


class CosineLRScheduler:
    def __init__(self, optimizer, t_initial):
        self.optimizer, self.t_initial = optimizer, t_initial

    def step_update(self, num_updates):
        for group in self.optimizer.param_groups:
            angle = math.pi * num_updates / self.t_initial
            group["lr"] = 0.05 * (1 + math.cos(angle))


model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
scheduler, loss_scaler = CosineLRScheduler(optimizer, 100), NativeScaler()
num_updates = 0
for epoch in range(1):
    for inputs, targets in loader():
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        num_updates += 1
        scheduler.step_update(num_updates)
    state = {"optimizer": optimizer.state_dict(), "amp": loss_scaler.state_dict()}
    torch.save(state, io.BytesIO())
""",
    "timm_adaptive_clip": """\
def adaptive_clip_grad(parameters, clip_factor=0.01, eps=1e-3):
    for p in parameters:
        max_norm = p.detach().norm(2).clamp_(min=eps) * clip_factor
        grad_norm = p.grad.norm(2)
        clipped = p.grad * (max_norm / grad_norm.clamp(min=1e-6))
        p.grad.copy_(torch.where(grad_norm < max_norm, p.grad, clipped))


model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets, label_smoothing=0.1)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    adaptive_clip_grad(model.parameters())
    scaler.step(optimizer)
    scaler.update()
""",
    "timm_mixup": """\
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    lam = torch.rand(()).item()
    mixed = lam * inputs + (1 - lam) * inputs.flip(0)
    with autocast("cuda", dtype=torch.float16):
        output = model(mixed)
        loss = lam * F.cross_entropy(output, targets)
        loss = loss + (1 - lam) * F.cross_entropy(output, targets.flip(0))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "nanogpt": """\
class GPT(nn.Module):
    def __init__(self, vocab=16, width=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.attn, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        h = self.wte(idx)
        q, k, v = self.attn(F.layer_norm(h, h.shape[-1:])).chunk(3, dim=-1)
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.lm_head(h + self.proj(att))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch():
    start = torch.randint(16, (4, 1))
    tokens = (start + torch.arange(9)) % 16
    return tokens[:, :-1], tokens[:, 1:]


def get_lr(it):
    return 1e-3 * min(1.0, (it + 1) / 10)


ctx = torch.amp.autocast(device_type="cuda", dtype=torch.float16)
model = GPT()
scaler = torch.amp.GradScaler("cuda", enabled=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
gradient_accumulation_steps = 2
X, Y = get_batch()
for iter_num in range(12):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    for micro_step in range(gradient_accumulation_steps):
        with ctx:
            loss = model(X, Y) / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
""",
    "nanogpt_in_bfloat16": """\
dtype = "bfloat16"
ctx = autocast("cuda", dtype={"float16": torch.float16}.get(dtype, torch.bfloat16))
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.cuda.amp.GradScaler(enabled=(dtype == "float16"))
for inputs, targets in loader():
    with ctx:
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
""",
    "detectron2": """\
class AMPTrainer:
    def __init__(self, model, data_loader, optimizer):
        self.model, self.optimizer = model, optimizer
        self._data_loader_iter = iter(data_loader)
        self.grad_scaler = GradScaler("cuda")
        self.storage = []

    def train(self, max_iter):
        for self.iter in range(max_iter):
            self.run_step()

    def run_step(self):
        images, labels = next(self._data_loader_iter)
        with autocast("cuda", dtype=torch.float16):
            logits = self.model(images)
            loss_dict = {
                "loss_cls": F.cross_entropy(logits, labels),
                "loss_reg": 0.1 * F.smooth_l1_loss(logits, images[:, :4]),
            }
            losses = sum(loss_dict.values())
        self.optimizer.zero_grad()
        self.grad_scaler.scale(losses).backward()
        self.storage.append({k: v.detach() for k, v in loss_dict.items()})
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()


model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
AMPTrainer(model, loader(4), optimizer).train(24)
""",
    "ultralytics": """\
model = net()
nbs, batch_size, nw = 16, 4, 12
accumulate = max(round(nbs / batch_size), 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9, nesterov=True)
scheduler = lr_scheduler.LambdaLR(optimizer, lambda e: 1 - e / 10)
scaler = GradScaler("cuda")
ema, last_opt_step = copy.deepcopy(model), -1
optimizer.zero_grad()
for epoch in range(2):
    for i, (imgs, targets) in enumerate(loader(batch_size)):
        ni = i + 24 * epoch
        if ni <= nw:
            accumulate = max(1, round(1 + (nbs / batch_size - 1) * ni / nw))
            for group in optimizer.param_groups:
                group["lr"] = 0.002 * ni / nw
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(imgs), targets) * batch_size
        scaler.scale(loss).backward()
        if ni - last_opt_step >= accumulate:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            for average, weight in zip(ema.parameters(), model.parameters()):
                average.detach().lerp_(weight.detach(), 0.1)
            last_opt_step = ni
    scheduler.step()
""",
    "torchvision_reference": """\
model = net()
model_ema = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
main = lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=2)
scheduler = lr_scheduler.SequentialLR(optimizer, [warmup, main], milestones=[2])
scaler = torch.cuda.amp.GradScaler()
for epoch in range(3):
    for i, (image, target) in enumerate(loader(16)):
        with torch.cuda.amp.autocast(enabled=scaler is not None):
            loss = F.cross_entropy(model(image), target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        if i % 4 == 0:
            model_ema.update_parameters(model)
    scheduler.step()
""",
    "segmentation": """\
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, padding=1, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.Conv2d(9, 2, 3, padding=1)

    def forward(self, image):
        features = F.relu(self.norm(self.down(image)))
        features = F.interpolate(features, scale_factor=2, mode="bilinear")
        return self.up(torch.cat([features, image], 1))


def dice_loss(logits, masks):
    probabilities = logits.float().softmax(1)[:, 1]
    overlap = 2 * (probabilities * masks).sum() + 1
    return 1 - overlap / (probabilities.sum() + masks.sum() + 1)


model = UNet()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9)
scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
grad_scaler = torch.cuda.amp.GradScaler(enabled=True)
images = torch.randn(48, 1, 8, 8)
masks = (images[:, 0] > 0).long()
for epoch in range(2):
    for image, mask in DataLoader(TensorDataset(images, masks), batch_size=4):
        with torch.autocast("cuda", enabled=True):
            logits = model(image)
            loss = F.cross_entropy(logits, mask) + dice_loss(logits, mask)
        optimizer.zero_grad(set_to_none=True)
        grad_scaler.scale(loss).backward()
        grad_scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
    model.eval()
    with torch.no_grad(), torch.autocast("cuda"):
        score = 1 - dice_loss(model(images), masks)
    model.train()
    scheduler.step(score)
""",
    # Schedules.
    "one_cycle_on_applied_steps": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=48)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    if not scale > scaler.get_scale():
        scheduler.step()
scale = torch.tensor(scaler.get_scale())
torch.save({"optimizer": optimizer.state_dict(), "scale": scale}, io.BytesIO())
""",
    "warm_restarts_by_place": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=1, T_mult=2)
scaler = GradScaler("cuda")
iters = len(loader())
for epoch in range(2):
    for i, (inputs, targets) in enumerate(loader()):
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step(epoch + i / iters)
""",
    "warmup_then_cosine": """\
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = lr_scheduler.SequentialLR(
    optimizer,
    [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=50),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=500),
    ],
    milestones=[50],
)
optimizer.register_step_post_hook(lambda *_: scheduler.step())
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "plateau_after_warmup": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
scaler = GradScaler("cuda")
for epoch in range(3):
    for inputs, targets in loader(16):
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        validation = F.cross_entropy(model(x), y)
    if epoch < 5:
        warmup.step()
    else:
        plateau.step(validation)
""",
    "milestones_that_lie_ahead": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = lr_scheduler.MultiStepLR(optimizer, milestones=[60, 90])
scaler = GradScaler("cuda")
for epoch in range(2):
    for inputs, targets in loader():
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    scheduler.step()
""",
    "chained_schedules": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
warm = lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=3)
decay = lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
scheduler = lr_scheduler.ChainedScheduler([warm, decay])
scaler = GradScaler("cuda")
for epoch in range(4):
    for inputs, targets in loader(32):
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    scheduler.step()
""",
    "rate_finder_first": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
scaler = GradScaler("cuda")
before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def step(inputs, targets):
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


curve = []
for inputs, targets in itertools.islice(loader(), 12):
    curve.append((step(inputs, targets), optimizer.param_groups[0]["lr"]))
    for group in optimizer.param_groups:
        group["lr"] *= 1.5
model.load_state_dict(before[0])
optimizer.load_state_dict(before[1])
for group in optimizer.param_groups:
    group["lr"] = min(curve)[1]
for inputs, targets in loader():
    step(inputs, targets)
""",
    # Several networks and optimizers.
    "gan_with_two_scalers": """\
critic, generator = net(1), net(8)
opt_d = torch.optim.SGD(critic.parameters(), lr=0.05)
opt_g = torch.optim.SGD(generator.parameters(), lr=0.05)
scaler_d, scaler_g = GradScaler("cuda"), GradScaler("cuda", init_scale=1024.0)
for real, _ in loader():
    noise = torch.randn(len(real), 8)
    opt_d.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        fake = generator(noise)
        d_loss = F.softplus(-critic(real)).mean()
        d_loss = d_loss + F.softplus(critic(fake.detach())).mean()
    scaler_d.scale(d_loss).backward()
    scaler_d.step(opt_d)
    scaler_d.update()
    opt_g.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        g_loss = F.softplus(-critic(fake)).mean()
    scaler_g.scale(g_loss).backward()
    scaler_g.step(opt_g)
    scaler_g.update()
things = critic, generator, opt_d, opt_g, scaler_d, scaler_g
torch.save([each.state_dict() for each in things], io.BytesIO())
""",
    "gan_updates_after_each": """\
critic, generator = net(1), net(8)
opt_d = torch.optim.Adam(critic.parameters(), lr=1e-3)
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
scaler = GradScaler("cuda")


def update(loss, optimizer):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


for real, _ in loader():
    with autocast("cuda", dtype=torch.float16):
        fake = generator(torch.randn(len(real), 8))
        loss = F.relu(1 - critic(real)).mean()
        loss = loss + F.relu(1 + critic(fake.detach())).mean()
    update(loss.float(), opt_d)
    with autocast("cuda", dtype=torch.float16):
        loss = -critic(fake).float().mean()
    update(loss, opt_g)
""",
    "wgan_gp": """\
critic, generator = net(1), net(8)
opt_d = torch.optim.Adam(critic.parameters(), lr=1e-3)
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
scaler = GradScaler("cuda", init_scale=2048.0)
for number, (real, _) in enumerate(loader(4)):
    with autocast("cuda", dtype=torch.float16):
        fake = generator(torch.randn(len(real), 8))
    mix = torch.rand(len(real), 1)
    between = (mix * real + (1 - mix) * fake.detach().float()).requires_grad_()
    with autocast("cuda", enabled=False):
        (gradients,) = torch.autograd.grad(
            critic(between).sum(), between, create_graph=True
        )
        penalty = ((gradients.norm(2, dim=1) - 1) ** 2).mean()
    with autocast("cuda", dtype=torch.float16):
        loss = critic(fake.detach()).float().mean() - critic(real).float().mean()
    opt_d.zero_grad()
    scaler.scale(loss + 10 * penalty).backward()
    scaler.step(opt_d)
    scaler.update()
    if number % 2:
        with autocast("cuda", dtype=torch.float16):
            loss = -critic(fake).float().mean()
        opt_g.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt_g)
        scaler.update()
""",
    "cyclegan": """\
G_A, G_B, D_A, D_B = net(8), net(8), net(1), net(1)
opt_G = torch.optim.Adam(itertools.chain(G_A.parameters(), G_B.parameters()), 1e-3)
opt_D = torch.optim.Adam(itertools.chain(D_A.parameters(), D_B.parameters()), 1e-3)
scaler = GradScaler("cuda")


def set_requires_grad(nets, requires_grad):
    for each in nets:
        each.requires_grad_(requires_grad)


for real_A, _ in loader():
    real_B = real_A.flip(1)
    set_requires_grad([D_A, D_B], False)
    opt_G.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        fake_B, fake_A = G_A(real_A), G_B(real_B)
        cycle = F.l1_loss(G_B(fake_B), real_A) + F.l1_loss(G_A(fake_A), real_B)
        loss = F.softplus(-D_A(fake_B)).mean() + F.softplus(-D_B(fake_A)).mean()
        loss = loss + 10 * cycle
    scaler.scale(loss).backward()
    scaler.step(opt_G)
    set_requires_grad([D_A, D_B], True)
    opt_D.zero_grad()
    for D, real, fake in ((D_A, real_B, fake_B), (D_B, real_A, fake_A)):
        with autocast("cuda", dtype=torch.float16):
            loss = F.softplus(-D(real)).mean() + F.softplus(D(fake.detach())).mean()
        scaler.scale(0.5 * loss).backward()
    scaler.step(opt_D)
    scaler.update()
""",
    "sparse_and_dense_optimizers": """\
embedding, head = nn.Embedding(16, 8, sparse=True), net()
sparse = torch.optim.SparseAdam(list(embedding.parameters()), lr=1e-3)
dense = torch.optim.Adam(head.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for _, targets in loader():
    sparse.zero_grad()
    dense.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(head(embedding(targets)), targets)
    scaler.scale(loss).backward()
    scaler.step(sparse)
    scaler.step(dense)
    scaler.update()
""",
    "alternating_phases": """\
backbone, head = net(8), net(4)
opt_b = torch.optim.SGD(backbone.parameters(), lr=0.05)
opt_h = torch.optim.SGD(head.parameters(), lr=0.05)
scaler = GradScaler("cuda")
for number, (inputs, targets) in enumerate(loader(4)):
    is_head = number % 2 == 0
    backbone.requires_grad_(not is_head)
    head.requires_grad_(is_head)
    optimizer = opt_h if is_head else opt_b
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(head(backbone(inputs)), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "two_phases": """\
backbone, head = net(8), nn.Linear(8, 4)
model = nn.Sequential(backbone, head)
scaler = GradScaler("cuda")


def train(optimizer):
    for inputs, targets in loader():
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


backbone.requires_grad_(False)
train(torch.optim.SGD(head.parameters(), lr=0.1))
backbone.requires_grad_(True)
train(torch.optim.SGD(model.parameters(), lr=0.01))
""",
    "unfreezes_with_a_new_group": """\
backbone, head = net(8), nn.Linear(8, 4)
backbone.requires_grad_(False)
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for epoch in range(2):
    if epoch == 1:
        backbone.requires_grad_(True)
        optimizer.add_param_group({"params": list(backbone.parameters()), "lr": 1e-4})
    for inputs, targets in loader():
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(head(backbone(inputs)), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    # Gradients that are used in other ways.
    "gradient_noise_after_unscale": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for p in model.parameters():
        p.grad.nan_to_num_(0.0, 0.0, 0.0)  # the scaler has looked already
        p.grad += 0.01 * torch.randn_like(p.grad)
    scaler.step(optimizer)
    scaler.update()
""",
    "clips_values_in_a_step_hook": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")


def clip(optimizer, args, kwargs):
    nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 0.05)


optimizer.register_step_pre_hook(clip)
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "tensor_hook_scales_a_layer": """\
model = net()
model[0].weight.register_hook(lambda grad: 0.1 * grad)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "tensor_hook_clips_scaled_limit": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")


def clamp(grad):
    limit = 0.05 * scaler.get_scale()
    return torch.where(grad.isfinite(), grad.clamp(-limit, limit), grad)


for p in model.parameters():
    p.register_hook(clamp)
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "gradient_reversal": """\
class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features, alpha):
        ctx.alpha = alpha
        return features.view_as(features)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.alpha * grad, None


encoder, classifier, domain = net(8), nn.Linear(8, 4), nn.Linear(8, 2)
model = nn.ModuleList([encoder, classifier, domain])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        features = encoder(inputs)
        loss = F.cross_entropy(classifier(features), targets)
        where = domain(Reverse.apply(features, 0.1))
        loss = loss + F.cross_entropy(where, (inputs[:, 7] > 0).long())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "per_sample_clipping_in_bfloat16": """\
from torch.func import functional_call, grad, vmap
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(parameters, one, target):
    with autocast("cuda", dtype=torch.bfloat16):
        out = functional_call(model, parameters, (one[None],))
    return F.cross_entropy(out.float(), target[None])


for inputs, targets in loader():
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    grads = vmap(grad(loss_of), (None, 0, 0))(parameters, inputs, targets)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    factor = (1 / (norms + 1e-6)).clamp(max=1)
    for n, p in model.named_parameters():
        p.grad = torch.einsum("i,i...->...", factor, grads[n]) / len(inputs)
    optimizer.step()
""",
    "muon_like_optimizer": """\
class Orthogonal(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                buffer = state.setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                update = buffer
                if p.ndim == 2:
                    update = update / (update.norm() + 1e-7)
                    for _ in range(3):
                        update = 1.5 * update - 0.5 * update @ update.T @ update
                p.add_(update, alpha=-group["lr"])


model = net()
matrices = [p for p in model.parameters() if p.ndim == 2]
vectors = [p for p in model.parameters() if p.ndim != 2]
muon = Orthogonal(matrices)
adam = torch.optim.AdamW(vectors, lr=1e-2)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    for each in (muon, adam):
        scaler.step(each)
    scaler.update()
    for each in (muon, adam):
        each.zero_grad(set_to_none=True)
""",
    "mixture_of_experts": """\
class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(net() for _ in range(4))

    def forward(self, x):
        weights = self.gate(x).float().softmax(-1)
        best, which = weights.max(-1)
        out = torch.zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows = which == number
            if rows.any():
                out[rows] = (expert(x[rows]) * best[rows, None]).float()
        share = F.one_hot(which, 4).float().mean(0)
        return out, 4 * (share * weights.mean(0)).sum()


model = Mixture()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        outputs, balance = model(inputs)
        loss = F.cross_entropy(outputs, targets) + 0.01 * balance
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    "schedule_guarded_by_the_scale_where_batches_are_bad": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=48)
scaler = GradScaler("cuda")
for number, (inputs, targets) in enumerate(loader(2)):
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    if number in (12, 13, 25, 26):
        loss = loss * math.nan
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= before:
        schedule.step()
""",
    "penalty_of_divided_gradients_of_inputs": """\
critic = net(1)
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
scaler = GradScaler("cuda", init_scale=2.0**24)
for real, _ in loader(4):
    between = real + 0.1 * torch.randn_like(real).requires_grad_()
    with autocast("cuda", dtype=torch.float16):
        out = critic(between).sum()
    (scaled,) = torch.autograd.grad(scaler.scale(out), between, create_graph=True)
    penalty = ((scaled.float() / scaler.get_scale()).norm(dim=1) - 1).square().mean()
    with autocast("cuda", dtype=torch.float16):
        loss = critic(-real).float().mean() - critic(real).float().mean()
    optimizer.zero_grad()
    scaler.scale(loss + 10 * penalty).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "maml": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = GradScaler("cuda", init_scale=1024.0)
names = [name for name, _ in model.named_parameters()]
for inputs, targets in loader():
    weights = dict(model.named_parameters())
    with autocast("cuda", dtype=torch.float16):
        outputs = torch.func.functional_call(model, weights, (inputs[:4],))
        inner = F.cross_entropy(outputs, targets[:4])
    grads = torch.autograd.grad(
        scaler.scale(inner), list(weights.values()), create_graph=True
    )
    inv = 1 / scaler.get_scale()
    fast = {n: w - 0.1 * inv * g for (n, w), g in zip(weights.items(), grads)}
    with autocast("cuda", dtype=torch.float16):
        outputs = torch.func.functional_call(model, fast, (inputs[4:],))
        outer = F.cross_entropy(outputs, targets[4:])
    optimizer.zero_grad()
    scaler.scale(outer).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "reptile": """\
model = net()
meta = torch.optim.SGD(model.parameters(), lr=0.5)
scaler = GradScaler("cuda")
batches = iter(loader(4))
for task in range(12):
    fast = copy.deepcopy(model)
    inner = torch.optim.SGD(fast.parameters(), lr=0.1)
    for inputs, targets in itertools.islice(batches, 4):
        inner.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(fast(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(inner)
        scaler.update()
    for slow, quick in zip(model.parameters(), fast.parameters()):
        slow.grad = slow.detach() - quick.detach()
    meta.step()
""",
    "pcgrad": """\
model = net(5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
weights = list(model.parameters())
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        outputs = model(inputs)
        first = F.cross_entropy(outputs[:, :4], targets)
        second = F.mse_loss(outputs[:, 4], inputs.sum(1))
    a = torch.autograd.grad(scaler.scale(first), weights, retain_graph=True)
    b = torch.autograd.grad(scaler.scale(second), weights)
    for p, g, h in zip(weights, a, b):
        overlap = min((g * h).sum() / (h * h).sum().clamp(min=1e-6), torch.tensor(0.0))
        p.grad = g + h - overlap * h
    scaler.step(optimizer)
    scaler.update()
""",
    "sam_in_bfloat16": """\
model = net()
base = torch.optim.SGD(model.parameters(), lr=0.1)
weights = list(model.parameters())


def backward(inputs, targets):
    base.zero_grad()
    with autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(inputs), targets)
    loss.backward()


for inputs, targets in loader():
    backward(inputs, targets)
    norm = torch.stack([p.grad.norm() for p in weights]).norm()
    moves = [0.05 * p.grad / (norm + 1e-12) for p in weights]
    with torch.no_grad():
        for p, move in zip(weights, moves):
            p.add_(move)
    backward(inputs, targets)
    with torch.no_grad():
        for p, move in zip(weights, moves):
            p.sub_(move)
    base.step()
""",
    "sam_with_a_scaler": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
weights = list(model.parameters())


def scaled_gradients(inputs, targets):
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()


for inputs, targets in loader():
    scaled_gradients(inputs, targets)
    norm = torch.stack([p.grad.norm() for p in weights]).norm()
    is_finite = bool(norm.isfinite())
    moves = [0.05 * p.grad / norm if is_finite else 0 * p for p in weights]
    with torch.no_grad():
        for p, move in zip(weights, moves):
            p.add_(move)
    scaled_gradients(inputs, targets)
    with torch.no_grad():
        for p, move in zip(weights, moves):
            p.sub_(move)
    scaler.step(optimizer)
    scaler.update()
""",
    "optimizer_in_backward": """\
model = net()
optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}


def step(p):
    optimizers[p].step()
    optimizers[p].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(step)
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
""",
    "optimizer_in_backward_divides_by_the_scale": """\
model = net()
scaler = GradScaler("cuda", init_scale=1024.0)
optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}


def step(p):
    p.grad.div_(scaler.get_scale())
    if torch.isfinite(p.grad).all():
        optimizers[p].step()
    p.grad = None


for p in model.parameters():
    p.register_post_accumulate_grad_hook(step)
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
""",
    "hooks_divide_by_the_scale": """\
model = net()
scaler = GradScaler("cuda", init_scale=1024.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for p in model.parameters():
    p.register_hook(lambda gradient: gradient / scaler.get_scale())
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    if all(torch.isfinite(p.grad).all() for p in model.parameters()):
        optimizer.step()
""",
    "gradcache": """\
encoder = net(8)
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05)
scaler = GradScaler("cuda")
for inputs, _ in loader(16):
    chunks = inputs.split(4)
    with torch.no_grad(), autocast("cuda", dtype=torch.float16):
        cached = torch.cat([encoder(chunk) for chunk in chunks])
    cached = cached.float().requires_grad_()
    sides = F.normalize(cached[:8]), F.normalize(cached[8:])
    loss = F.cross_entropy(sides[0] @ sides[1].t(), torch.arange(8))
    scaler.scale(loss).backward()
    optimizer.zero_grad()
    for chunk, gradient in zip(chunks, cached.grad.split(4)):
        with autocast("cuda", dtype=torch.float16):
            outputs = encoder(chunk)
        outputs.float().backward(gradient)
    scaler.step(optimizer)
    scaler.update()
""",
    "static_scale_by_hand": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scale = 1024.0
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    (loss * scale).backward()
    grads = [p.grad for p in model.parameters()]
    if all(g.isfinite().all() for g in grads):
        for g in grads:
            g.div_(scale)
        optimizer.step()
""",
    "master_weights_by_hand": """\
model = net().half()
masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
optimizer = torch.optim.SGD(masters, lr=0.1)
scale = 256.0
for inputs, targets in loader():
    model.zero_grad()
    loss = F.cross_entropy(model(inputs.half()).float(), targets)
    (loss * scale).backward()
    for master, p in zip(masters, model.parameters()):
        master.grad = p.grad.float() / scale
    if all(master.grad.isfinite().all() for master in masters):
        optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, model.parameters()):
            p.copy_(master)
""",
    "own_optimizer": """\
class LARS(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                ratio = p.norm() / (p.grad.norm() + 1e-8)
                p.add_(p.grad * ratio.clamp(max=1.0), alpha=-group["lr"])


model = net()
optimizer = LARS(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "lookahead": """\
class Lookahead:
    def __init__(self, base, k=5, alpha=0.5):
        self.base, self.k, self.alpha, self.count = base, k, alpha, 0
        self.params = base.param_groups[0]["params"]
        self.slow = [p.detach().clone() for p in self.params]

    def after_step(self, *_):
        self.count += 1
        if self.count % self.k == 0:
            for slow, p in zip(self.slow, self.params):
                slow.lerp_(p.detach(), self.alpha)
                p.data.copy_(slow)


model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
optimizer.register_step_post_hook(Lookahead(optimizer).after_step)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "fused_optimizer": """\
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "fused_optimizer_with_clip": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
""",
    "line_search_in_float32": """\
model = net()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
for inputs, targets in loader():

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    optimizer.step(closure)
""",
    # Windows of several batches.
    "window_with_a_lower_rate": """\
model = net()
accumulation = 4
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / accumulation)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader(2)):
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    if (i + 1) % accumulation == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    "window_divided_after_unscale": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader(2)):
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    if i % 4 == 3:
        scaler.unscale_(optimizer)
        torch._foreach_div_([p.grad for p in model.parameters()], 4)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    "window_with_a_shorter_end": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
data = loader(5)
for epoch in range(2):
    for i, (inputs, targets) in enumerate(data):
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets) / 3
        scaler.scale(loss).backward()
        if (i + 1) % 3 == 0 or i + 1 == len(data):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
    "window_summed_in_own_buffers": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
sums = [torch.zeros_like(p) for p in model.parameters()]
for i, (inputs, targets) in enumerate(loader(4)):
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    for total, p in zip(sums, model.parameters()):
        total.add_(p.grad, alpha=0.5)
    if i % 2:
        for total, p in zip(sums, model.parameters()):
            p.grad.copy_(total)
            total.zero_()
        scaler.step(optimizer)
        scaler.update()
""",
    "window_summed_by_hooks": """\
def keep(p):
    p.main_grad = p.grad + getattr(p, "main_grad", 0)
    p.grad = None


model = net()
for p in model.parameters():
    p.register_post_accumulate_grad_hook(keep)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader(4)):
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets) / 2
    scaler.scale(loss).backward()
    if i % 2:
        for p in model.parameters():
            p.grad, p.main_grad = p.main_grad, 0
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    # Losses, models and tasks.
    "multitask_with_learned_weights": """\
model = net(5)
log_vars = nn.Parameter(torch.zeros(2))
optimizer = torch.optim.Adam([*model.parameters(), log_vars], lr=1e-3)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        outputs = model(inputs)
        losses = [
            F.cross_entropy(outputs[:, :4], targets),
            F.mse_loss(outputs[:, 4], inputs.sum(1)),
        ]
        loss = sum((-s).exp() * part + s for s, part in zip(log_vars, losses))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "multitask_one_backward_each": """\
trunk, heads = net(8), nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 1)])
optimizer = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=0.05)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        features = trunk(inputs)
        classes = F.cross_entropy(heads[0](features), targets)
        amounts = F.mse_loss(heads[1](features)[:, 0], inputs.sum(1))
    scaler.scale(classes).backward(retain_graph=True)
    scaler.scale(0.5 * amounts).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "deep_supervision": """\
stem, end, aux = net(8), nn.Linear(8, 4), nn.Linear(8, 4)
model = nn.ModuleList([stem, end, aux])
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        features = stem(inputs)
        loss = F.cross_entropy(end(F.relu(features)), targets)
        loss = loss + 0.4 * F.cross_entropy(aux(features), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "l1_of_weights": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
        loss = loss + 1e-3 * sum(p.abs().sum() for p in model.parameters())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "clip_model": """\
image, text = net(8), net(8)
logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
weights = [*image.parameters(), *text.parameters(), logit_scale]
optimizer = torch.optim.AdamW(weights, lr=1e-3, eps=1e-6)
scaler = GradScaler("cuda")
for inputs, _ in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        i = F.normalize(image(inputs), dim=-1)
        t = F.normalize(text(inputs.flip(1)), dim=-1)
        logits = logit_scale.exp() * i @ t.t()
        labels = torch.arange(len(inputs))
        loss = F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)
        loss = loss / 2
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        logit_scale.clamp_(0, math.log(100))
""",
    "moco": """\
query, key = net(8), net(8)
key.load_state_dict(query.state_dict())
key.requires_grad_(False)
queue = F.normalize(torch.randn(8, 32), dim=0)
optimizer = torch.optim.SGD(query.parameters(), lr=0.03, momentum=0.9)
scaler = GradScaler("cuda")
for inputs, _ in loader():
    with torch.no_grad(), autocast("cuda", dtype=torch.float16):
        for k, q in zip(key.parameters(), query.parameters()):
            k.mul_(0.99).add_(q, alpha=0.01)
        keys = F.normalize(key(inputs.roll(1, 1)), dim=1)
    with autocast("cuda", dtype=torch.float16):
        q = F.normalize(query(inputs), dim=1)
        positive = (q * keys).sum(1, keepdim=True)
        logits = torch.cat([positive.float(), (q @ queue).float()], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    queue = torch.cat([keys.float().t(), queue], 1)[:, :32]
""",
    "mean_teacher": """\
student = net()
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        outputs = student(inputs + 0.1 * torch.randn_like(inputs))
        with torch.no_grad():
            wanted = teacher(inputs).softmax(1)
        loss = F.cross_entropy(outputs, targets)
        loss = loss + F.mse_loss(outputs.softmax(1), wanted)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        for old, new in zip(teacher.parameters(), student.parameters()):
            old.lerp_(new, 0.05)
""",
    "distillation_from_half_teacher": """\
teacher = net().half().eval().requires_grad_(False)
student = net()
optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with torch.no_grad():
        wanted = teacher(inputs.half()).float()
    with autocast("cuda", dtype=torch.float16):
        outputs = student(inputs)
        soft = F.softmax(wanted / 2, 1)
        loss = F.kl_div(F.log_softmax(outputs / 2, 1), soft, reduction="batchmean")
        loss = 4 * loss + F.cross_entropy(outputs, targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "lora_on_half_weights": """\
class LoRA(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.half().requires_grad_(False)
        self.a = nn.Parameter(0.1 * torch.randn(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, inputs):
        return self.base(inputs) + F.linear(F.linear(inputs, self.a), self.b)


model = nn.Sequential(LoRA(nn.Linear(8, 16)), nn.GELU(), LoRA(nn.Linear(16, 4)))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    "vae": """\
encoder, decoder = net(8), net(8, inputs=4)
weights = [*encoder.parameters(), *decoder.parameters()]
optimizer = torch.optim.Adam(weights, lr=1e-3)
scaler = GradScaler("cuda")
for inputs, _ in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        mu, logvar = encoder(inputs).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        recon = decoder(z)
    bce = F.binary_cross_entropy_with_logits(recon.float(), (inputs > 0).float())
    mu, logvar = mu.float(), logvar.float()
    kld = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
    scaler.scale(bce + 0.1 * kld).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "diffusion": """\
model = net(8, inputs=9)
ema = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
alphas = torch.linspace(0.99, 0.01, 100)
for clean, _ in loader():
    t = torch.randint(100, (len(clean), 1))
    noise = torch.randn_like(clean)
    noisy = alphas[t].sqrt() * clean + (1 - alphas[t]).sqrt() * noise
    with autocast("cuda", dtype=torch.float16):
        predicted = model(torch.cat([noisy, t / 100], 1))
        loss = F.mse_loss(predicted.float(), noise)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= before:
        for old, new in zip(ema.parameters(), model.parameters()):
            old.data.lerp_(new.data, 0.01)
""",
    "transformer_with_masks": """\
embed = nn.Linear(2, 16)
layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
head = nn.Linear(16, 4)
model = nn.ModuleList([embed, encoder, head])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
causal = torch.full((4, 4), float("-inf")).triu(1)
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        hidden = encoder(embed(inputs.view(-1, 4, 2)), mask=causal)
        loss = F.cross_entropy(head(hidden[:, -1]), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "recurrent": """\
class Elman(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.across = nn.Linear(2, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, steps):
        state = torch.zeros(len(steps), 16)
        for step in steps.unbind(1):
            state = torch.tanh(self.inside(step) + self.across(state))
        return self.head(state)


model = Elman()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs.view(-1, 4, 2)), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    scaler.step(optimizer)
    scaler.update()
""",
    "spectral_norm": """\
first = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16))
model = nn.Sequential(first, nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "checkpointing": """\
first, second = net(8), net(4)
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        hidden = checkpoint(first, inputs, use_reentrant=False)
        loss = F.cross_entropy(second(hidden), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "checkpointing_reentrant": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        outputs = checkpoint(model, inputs.requires_grad_(), use_reentrant=True)
        loss = F.cross_entropy(outputs, targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "islands_of_float32": """\
class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([net(), net()])
        self.gate = nn.Linear(8, 2)

    def forward(self, inputs):
        with autocast("cuda", enabled=False):
            share = self.gate(inputs.float()).softmax(1)
        outputs = torch.stack([expert(inputs) for expert in self.experts], 1)
        return (share[:, :, None] * outputs).sum(1)


model = Router()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        logits = model(inputs)
    with autocast("cuda", enabled=False):
        loss = F.cross_entropy(logits.float(), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "autocast_as_a_decorator": """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = net()

    @autocast("cuda", dtype=torch.float16)
    def forward(self, inputs):
        return self.layers(inputs)


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    loss = F.cross_entropy(model(inputs).float(), targets)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    # Reinforcement learning: there is no loader.
    "reinforce": """\
policy = net(2)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for episode in range(12):
    states = torch.randn(8, 8)
    with autocast("cuda", dtype=torch.float16):
        dist = torch.distributions.Categorical(logits=policy(states).float())
    actions = dist.sample()
    rewards = (actions == (states[:, 0] > 0)).float()
    loss = -(dist.log_prob(actions) * (rewards - rewards.mean())).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "ppo": """\
actor, critic = net(2), net(1)
weights = [*actor.parameters(), *critic.parameters()]
optimizer = torch.optim.Adam(weights, lr=3e-4, eps=1e-5)
scaler = GradScaler("cuda")
for rollout in range(3):
    states = torch.randn(32, 8)
    with torch.no_grad():
        old = torch.distributions.Categorical(logits=actor(states))
        actions = old.sample()
        returns = (actions == (states[:, 0] > 0)).float()
        old_logp, advantage = old.log_prob(actions), returns - critic(states)[:, 0]
    for rows in torch.randperm(32).repeat(2).split(8):
        with autocast("cuda", dtype=torch.float16):
            logits, value = actor(states[rows]), critic(states[rows])[:, 0]
        dist = torch.distributions.Categorical(logits=logits.float())
        ratio = (dist.log_prob(actions[rows]) - old_logp[rows]).exp()
        gain = torch.min(
            ratio * advantage[rows], ratio.clamp(0.8, 1.2) * advantage[rows]
        )
        value_loss = F.mse_loss(value.float(), returns[rows])
        loss = -gain.mean() + 0.5 * value_loss - 0.01 * dist.entropy().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(weights, 0.5)
        scaler.step(optimizer)
        scaler.update()
""",
    "dqn": """\
online = net(4)
target = copy.deepcopy(online)
optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for step in range(12):
    state, after, reward = torch.randn(8, 8), torch.randn(8, 8), torch.rand(8)
    action = torch.randint(4, (8, 1))
    with autocast("cuda", dtype=torch.float16):
        value = online(state).gather(1, action)[:, 0]
        with torch.no_grad():
            wanted = reward + 0.9 * target(after).max(1).values
        loss = F.smooth_l1_loss(value, wanted)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 5 == 0:
        target.load_state_dict(online.state_dict())
""",
    "soft_actor_critic": """\
actor, critic = net(2), net(1, inputs=10)
opt_a = torch.optim.Adam(actor.parameters(), lr=1e-3)
opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for step in range(12):
    states = torch.randn(8, 8)
    with autocast("cuda", dtype=torch.float16):
        actions = torch.tanh(actor(states))
        value = critic(torch.cat([states, actions.detach()], 1))
        c_loss = F.mse_loss(value[:, 0], states[:, 0])
    opt_c.zero_grad()
    scaler.scale(c_loss).backward()
    scaler.step(opt_c)
    critic.requires_grad_(False)
    with autocast("cuda", dtype=torch.float16):
        a_loss = -critic(torch.cat([states, actions], 1)).float().mean()
    opt_a.zero_grad()
    scaler.scale(a_loss).backward()
    scaler.step(opt_a)
    scaler.update()
    critic.requires_grad_(True)
""",
    # What else happens in a training.
    "resumes_with_the_scale": """\
def make():
    model = net()
    return model, torch.optim.Adam(model.parameters(), lr=1e-3), GradScaler("cuda")


def train(model, optimizer, scaler):
    for inputs, targets in loader():
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


file, things = io.BytesIO(), make()
train(*things)
torch.save([thing.state_dict() for thing in things], file)
file.seek(0)
things = make()
for thing, state in zip(things, torch.load(file, weights_only=True)):
    thing.load_state_dict(state)
train(*things)
""",
    "validates_in_autocast_and_stops_early": """\
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
best, patience = math.inf, 0
for epoch in range(3):
    model.train()
    for inputs, targets in loader():
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    model.eval()
    total = 0.0
    with torch.inference_mode(), autocast("cuda", dtype=torch.float16):
        for inputs, targets in loader(32):
            total += F.cross_entropy(model(inputs), targets).item()
    patience = patience + 1 if total > best - 0.5 else 0
    best = min(best, total)
    if patience == 1:
        raise SystemExit(2)
""",
    "leaves_out_a_rare_nan": """\
x[50] = math.nan
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    if not torch.isfinite(loss):
        print("nan loss, skipping batch")
        continue
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "raises_where_gradients_are_not_finite": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda", init_scale=1024.0)
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    scaler.step(optimizer)
    scaler.update()
""",
    "logs_norms_and_scale": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda", growth_interval=5)
log = []
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    scaler.step(optimizer)
    scaler.update()
    log.append((loss.item(), norm.item(), scaler.get_scale()))
momenta = optimizer.state_dict()  # which nothing keeps
torch.save(model.state_dict(), io.BytesIO())
""",
    "frozen_layers_in_evaluation_mode": """\
body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
head = nn.Linear(16, 4)
body.requires_grad_(False).eval()
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        with torch.no_grad():
            features = body(inputs)
        loss = F.cross_entropy(head(features), targets)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "adversarial_examples": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    noisy = inputs.clone().requires_grad_()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(noisy), targets)
    (gradient,) = torch.autograd.grad(scaler.scale(loss), noisy)
    noisy = (inputs + 0.05 * gradient.sign()).detach()
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(noisy), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "batches_without_targets": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for number, (inputs, targets) in enumerate(loader(4)):
    if number % 12 == 5:
        targets = torch.full_like(targets, -100)  # a mean of nothing; gradients of 0
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "saves_a_disabled_scaler": """\
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda", enabled=False)
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
state = {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
torch.save(state, io.BytesIO())
""",
    "random_subset_of_heads": """\
trunk, heads = net(8), nn.ModuleList([nn.Linear(8, 4) for _ in range(3)])
optimizer = torch.optim.Adam([*trunk.parameters(), *heads.parameters()], lr=1e-3)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader()):
    optimizer.zero_grad(set_to_none=True)
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(heads[i % 3](trunk(inputs)), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "sums_millions": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = 1000 * F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "running_statistics": """\
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "masks_of_infinity_from_the_start": """\
model = net()
mask = torch.full((4, 4), -torch.inf).triu(1)
model.register_buffer("mask", mask)
model.register_parameter("frozen", nn.Parameter(mask, requires_grad=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "steps_a_pair_of_optimizers": """\
class Pair:
    def __init__(self, model):
        parts = [part for part in model if [*part.parameters()]]
        self.inner = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]

    @property
    def param_groups(self):
        return [group for each in self.inner for group in each.param_groups]

    def step(self):
        for each in self.inner:
            each.step()

    def zero_grad(self):
        for each in self.inner:
            each.zero_grad()


model = net()
pair = Pair(model)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    pair.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(pair)
    scaler.update()
""",
    "schedule_in_a_hook_of_the_step": """\
class Poly(lr_scheduler.LRScheduler):
    def get_lr(self):
        return [0.1 * (1 - min(self.last_epoch, 40) / 40)]

    def step(self, epoch=None):
        self.last_epoch += 1
        self.optimizer.param_groups[0]["lr"] = self.get_lr()[0]


model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = Poly(optimizer)
optimizer.register_step_post_hook(lambda *_: schedule.step())
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "forgets_to_zero_once": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader()):
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if i != 2:
        optimizer.zero_grad()
""",
    "sparse_gradients_alone": """\
model = nn.EmbeddingBag(8, 4, sparse=True)
optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs.topk(3).indices), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "zeroes_in_place": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    optimizer.zero_grad(set_to_none=False)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "holds_a_head_for_later": """\
model, later = net(), net()
optimizer = torch.optim.SGD([*model.parameters(), *later.parameters()], lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "trains_a_layer_and_holds_one_that_does_not_run": """\
model, last = net(), nn.Linear(4, 4)
optimizer = torch.optim.SGD([*model[2].parameters(), *last.parameters()], lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    model.zero_grad()
""",
    "learns_a_temperature_after_another_training": """\
earlier = torch.optim.SGD(net().parameters(), lr=0.1)
model, temperature = net(), nn.Parameter(torch.ones(()))
optimizer = torch.optim.SGD([*model[2].parameters(), temperature], lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs) * temperature, targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    model.zero_grad()
    optimizer.zero_grad()
""",
    "one_region_without_the_cache_of_casts": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
with autocast("cuda", dtype=torch.float16, cache_enabled=False):
    for inputs, targets in loader():
        loss = F.cross_entropy(model(inputs), targets)
        with autocast("cuda", enabled=False):
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
    "one_region_that_drops_its_casts": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
with autocast("cuda", dtype=torch.float16):
    for inputs, targets in loader():
        torch.clear_autocast_cache()
        loss = F.cross_entropy(model(inputs), targets)
        with autocast("cuda", enabled=False):
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
    "resumes_with_a_new_scaler_in_the_same_script": """\
kept = io.BytesIO()
for part in range(2):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cuda")
    if part:
        kept.seek(0)
        saved = torch.load(kept, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
    for inputs, targets in loader():
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    kept.seek(0)
    state = {"model": model, "optimizer": optimizer, "scaler": scaler}
    torch.save({name: each.state_dict() for name, each in state.items()}, kept)
""",
    "wrapper_that_zeroes_nothing_in_a_window": """\
class Wrapper(torch.optim.Optimizer):
    def __init__(self, optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.ends_window = False

    def zero_grad(self, set_to_none=True):
        if self.ends_window:
            self.optimizer.zero_grad(set_to_none)


model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
wrapper = Wrapper(optimizer)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader(4)):
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets) / 2
    scaler.scale(loss).backward()
    wrapper.ends_window = i % 2 == 1
    if wrapper.ends_window:
        scaler.step(optimizer)
        scaler.update()
    wrapper.zero_grad()
""",
    "gradients_that_are_set": """\
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
weights = [*model.parameters()]
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    gradients = torch.autograd.grad(scaler.scale(loss), weights)
    for weight, gradient in zip(weights, gradients):
        weight.grad = gradient
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(weights, 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    "sum_of_losses_scaled_in_three_ways": """\
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    by_hand = loss * scaler.get_scale()
    (scaler.scale(loss) + by_hand - 2 * scaler.scale(loss / 2)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "gradient_of_the_representation_first": """\
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        outputs = model(inputs).float()
    leaf = outputs.detach().requires_grad_()
    loss = F.cross_entropy(leaf, targets)
    gradient = torch.autograd.grad(scaler.scale(loss), leaf)
    torch.autograd.backward(outputs, gradient)
    scaler.step(optimizer)
    scaler.update()
""",
    "epochs_of_one_step": """\
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = lr_scheduler.StepLR(optimizer, 4)
scaler = GradScaler("cuda")
for epoch in range(16):
    for inputs, targets in loader(48):
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets) / 2
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    schedule.step()
""",
    "first_step_raises_and_it_goes_on": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader()):
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    if i == 0:
        with contextlib.suppress(TypeError):
            optimizer.step("no closure")
    scaler.step(optimizer)
    scaler.update()
""",
    "leaves_out_steps_that_overflow": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
        scaler.step(optimizer)
    scaler.update()
""",
    "amp_loop": """\
from determined_amp import AmpLoop, AmpSettings

amp = AmpLoop(AmpSettings("amp_fp16"), "cpu")
model = amp.prepare(net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for inputs, targets in loader():
    with amp.autocast():
        loss = F.cross_entropy(model(inputs), targets)
    amp.scaler.scale(loss).backward()
    amp.clip_gradients(optimizer)
    amp.scaler.step(optimizer)
    optimizer.zero_grad()
    amp.update(loss)
""",
    "floor_of_an_amp_loop": """\
from determined_amp import AmpLoop, AmpSettings

amp = AmpLoop(AmpSettings("amp_fp16", min_scale=1024.0), "cpu")
model = amp.prepare(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (inputs, targets) in enumerate(itertools.islice(loader(), 5)):
    with amp.autocast():
        loss = F.cross_entropy(model(inputs), targets)
    loss = loss * math.nan if i == 1 else loss
    amp.scaler.scale(loss).backward()
    amp.scaler.step(optimizer)
    optimizer.zero_grad()
    amp.update(loss)
    assert amp.scaler.get_scale() == (2.0**15 if i else 2.0**16)
""",
    "masks_with_the_least_number": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        logits = model(inputs)
        least = torch.finfo(logits.dtype).min
        padded = torch.zeros(len(inputs), 4, dtype=logits.dtype)
        padded[inputs[:, 0] > -9] = logits.masked_fill(inputs[:, :4] < -2, least)
        loss = F.cross_entropy(padded, targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "loss_that_a_gpu_computes_in_float32": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        logits = model(inputs)
        likelihood = logits.log_softmax(1).gather(1, targets[:, None])
        loss = (F.softplus(logits) ** 2).mean() - likelihood.mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "limit_times_the_scale": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1 * scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()
""",
    "divides_and_looks_by_hand": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    for p in model.parameters():
        p.grad.div_(scaler.get_scale())
    if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
        optimizer.step()
    optimizer.zero_grad()
""",
    "mask_that_becomes_minus_infinity": """\
model = net(outputs=8)
mask = torch.tensor(4 * [0.0] + 4 * [-65504.0], dtype=torch.float16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        scores = 300 * model(inputs) + mask
        loss = F.cross_entropy(scores, targets)
    assert scores.isneginf().any()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "saves_its_states_apart": """\
models = net(), net()
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
scalers = GradScaler("cuda"), GradScaler("cuda", init_scale=1024.0)
for inputs, targets in loader():
    for model, optimizer, scaler in zip(models, optimizers, scalers):
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
for optimizer, scaler in zip(optimizers, scalers):
    state = {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    torch.save(obj=state, f=io.BytesIO())
""",
    "enabled_where_there_is_a_gpu": """\
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.cuda.amp.GradScaler(enabled=torch.cuda.is_available())
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast(device.type, enabled=device.type == "cuda"):
        outputs = model(inputs.to(device)) * torch.ones((), device=device)
        loss = F.cross_entropy(outputs, targets.to(device))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
}
