"""Scripts with one mistake each, in the shapes of public threads about AMP.

The line to name, where there is one, ends in `# HERE`.
"""

from __future__ import annotations

from typing import NamedTuple


class Mistake(NamedTuple):
    """A script behind `PRELUDE`, and what a good tool says of it."""

    level: str  # of the finding, or two with a | between them
    findings: str  # that may tell it, the cause before its effects, with | between them
    script: str
    misleading: tuple[str, ...] = ()  # words that would send its owner the wrong way
    says: tuple[str, ...] = ()  # parts of lines that tell the cause and what helps


# What helps where float16 is the cause.
OTHER_PRECISIONS = ("bfloat16", "enabled=False")

WRONG: dict[str, Mistake] = {
    # Clips of gradients that are still scaled.
    "clip_before_unscale": Mistake(
        "fault",
        "clip_scaled",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # HERE
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "clip_value_before_unscale": Mistake(
        "fault",
        "clip_value_scaled",
        """\
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.cuda.amp.GradScaler()
for inputs, targets in loader():
    optimizer.zero_grad()
    with torch.cuda.amp.autocast():
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)  # HERE
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "unscales_only_where_it_logs": Mistake(
        "fault",
        "clip_scaled",
        """\
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scaler = GradScaler("cpu")
for i, (inputs, targets) in enumerate(loader()):
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    if i % 5 == 0:
        scaler.unscale_(optimizer)
        print(max(p.grad.norm().item() for p in model.parameters()))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # HERE
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "large_limit_before_unscale": Mistake(
        "fault",
        "clip_scaled|depends_on_scale",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda", init_scale=1024.0)
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 40.0)  # HERE
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "clip_of_the_other_model": Mistake(
        "fault",
        "clip_scaled",
        """\
critic, generator = net(1), net(8)
opt_d = torch.optim.SGD(critic.parameters(), lr=0.05)
opt_g = torch.optim.SGD(generator.parameters(), lr=0.05)
scaler = GradScaler("cuda")
for real, _ in loader():
    opt_d.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        fake = generator(torch.randn(len(real), 8))
        d_fake = critic(fake.detach())
        loss = F.softplus(-critic(real)).mean() + F.softplus(d_fake).mean()
    scaler.scale(loss).backward()
    scaler.unscale_(opt_d)
    nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
    scaler.step(opt_d)
    opt_g.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.softplus(-critic(fake)).mean()
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(generator.parameters(), 0.1)  # HERE
    scaler.step(opt_g)
    scaler.update()
""",
    ),
    "clip_in_hooks": Mistake(
        "fault",
        "depends_on_scale|overflow_hidden|clip_value_scaled",
        """\
model = net()
for p in model.parameters():
    p.register_hook(lambda grad: torch.clamp(grad, -1.0, 1.0))
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
    ),
    "clip_by_hand": Mistake(
        "fault",
        "depends_on_scale|clip_scaled",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.mul_(1.0 / norm.clamp(min=1.0))
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "adaptive_clip_before_unscale": Mistake(
        "fault",
        "depends_on_scale|clip_scaled",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    for p in model.parameters():
        limit = 0.01 * p.detach().norm().clamp(min=1e-3)
        p.grad.mul_((limit / p.grad.norm().clamp(min=1e-6)).clamp(max=1.0))
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "trust_ratio_before_unscale": Mistake(
        "fault",
        "depends_on_scale",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    for p in model.parameters():
        if p.ndim > 1:
            p.grad.mul_(0.02 * p.detach().norm() / p.grad.norm())
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "steps_only_below_a_scaled_norm": Mistake(
        "fault",
        "step_missing",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    if norm > 10:
        continue
    scaler.step(optimizer)
    scaler.update()
""",
        says=("look at: the condition before the step",),
    ),
    "stops_at_the_first_nan": Mistake(
        "suspicion",
        "left_out",
        """\
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for number, (inputs, targets) in enumerate(loader()):
    with autocast("cuda", dtype=torch.float16):
        out = model(inputs * (300000.0 if number > 6 else 1.0))
        loss = F.cross_entropy(out, targets)  # HERE
    if not torch.isfinite(loss):
        break
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "clip_of_each_micro_batch": Mistake(
        "fault",
        "clip_scaled",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader(4)):
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets) / 2
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # HERE
    if i % 2:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
        says=(
            "look at: scaler.unscale_(optimizer), then the clip: both after the last",
        ),
    ),
    # Added while the gradients are scaled.
    "noise_before_unscale": Mistake(
        "fault",
        "depends_on_scale",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=0.05)
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "decay_before_unscale": Mistake(
        "fault",
        "depends_on_scale",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.grad.add_(p, alpha=0.05)
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "proximal_term_before_unscale": Mistake(
        "fault",
        "depends_on_scale",
        """\
model = net()
start = [p.detach().clone() + 0.1 for p in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    for p, anchor in zip(model.parameters(), start):
        p.grad += 0.1 * (p.detach() - anchor)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    # Scaling, stepping, updating.
    "loss_not_scaled": Mistake(
        "fault",
        "unscaled_loss",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss)
    loss.backward()  # HERE
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "auxiliary_loss_not_scaled": Mistake(
        "fault",
        "unscaled_loss",
        """\
model = net(5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        outputs = model(inputs)
        loss = F.cross_entropy(outputs[:, :4], targets)
        auxiliary = F.mse_loss(outputs[:, 4], inputs.sum(1))
    scaler.scale(loss).backward(retain_graph=True)
    auxiliary.backward()  # HERE
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "penalty_added_to_scaled_loss": Mistake(
        "fault",
        "unscaled_loss|depends_on_scale",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    decay = 0.1 * sum(p.square().sum() for p in model.parameters())
    (scaler.scale(loss) + decay).backward()  # HERE
    scaler.step(optimizer)
    scaler.update()
""",
        says=("look at: scaler.scale(...) around the sum of all terms of the loss",),
    ),
    "last_micro_batch_alone_is_scaled": Mistake(
        "fault",
        "unscaled_loss|depends_on_scale",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader(4)):
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets) / 2
    if i % 2 == 0:
        loss.backward()  # HERE
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    "scaled_twice": Mistake(
        "fault",
        "scales_mixed|depends_on_scale|no_steps",
        """\
def training_step(inputs, targets):
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    return scaler.scale(loss)


model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
scaler = GradScaler("cuda", init_scale=1024.0)
for batch in loader():
    optimizer.zero_grad()
    loss = training_step(*batch)
    scaler.scale(loss).backward()  # HERE
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "optimizer_steps_itself": Mistake(
        "fault",
        "step_without_scaler|update_in_window",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    optimizer.step()  # HERE
""",
    ),
    "optimizer_steps_itself_then_update": Mistake(
        "fault",
        "step_without_scaler",
        """\
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    optimizer.step()  # HERE
    scaler.update()
""",
    ),
    "unscales_and_steps_itself": Mistake(
        "fault",
        "step_without_scaler",
        """\
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()  # HERE
    scaler.update()
""",
    ),
    "divides_and_steps_itself": Mistake(
        "fault",
        "step_without_scaler",
        """\
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    for p in model.parameters():
        p.grad.div_(scaler.get_scale())
    optimizer.step()  # HERE
""",
        says=("look at: what divides or replaces the gradients",),
    ),
    "one_of_two_optimizers_steps_itself": Mistake(
        "fault",
        "step_without_scaler",
        """\
body, head = net(8), nn.Linear(8, 4)
opt_b = torch.optim.SGD(body.parameters(), lr=0.05)
opt_h = torch.optim.SGD(head.parameters(), lr=0.05)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    opt_b.zero_grad()
    opt_h.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(head(body(inputs)), targets)
    scaler.scale(loss).backward()
    scaler.step(opt_b)
    opt_h.step()  # HERE
    scaler.update()
""",
    ),
    "critic_steps_itself": Mistake(
        "fault",
        "step_without_scaler",
        """\
critic, generator = net(1), net(8)
opt_d = torch.optim.SGD(critic.parameters(), lr=0.02)
opt_g = torch.optim.SGD(generator.parameters(), lr=0.02)
scaler = GradScaler("cuda")
for real, _ in loader():
    opt_d.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        fake = generator(torch.randn(len(real), 8))
        d_fake = critic(fake.detach())
        loss = F.softplus(-critic(real)).mean() + F.softplus(d_fake).mean()
    scaler.scale(loss).backward()
    opt_d.step()  # HERE
    opt_g.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.softplus(-critic(fake)).mean()
    scaler.scale(loss).backward()
    scaler.step(opt_g)
    scaler.update()
""",
    ),
    "steps_twice": Mistake(
        "fault",
        "step_twice",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    optimizer.step()  # HERE
    scaler.update()
""",
    ),
    "no_update": Mistake(
        "fault",
        "update_missing",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # HERE
""",
    ),
    "no_update_with_clip": Mistake(
        "fault",
        "update_missing",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # HERE
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
""",
    ),
    "update_before_step": Mistake(
        "fault",
        "unscaled_twice|depends_on_scale|update_in_window",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.update()
    scaler.step(optimizer)  # HERE
""",
    ),
    "update_after_each_optimizer": Mistake(
        "fault",
        "scales_mixed",
        """\
models = [net(), net()]
optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in models]
scaler = GradScaler("cuda", growth_interval=2, init_scale=16.0)
for inputs, targets in loader():
    for optimizer in optimizers:
        optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(models[0](inputs) + models[1](inputs), targets)
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()  # HERE
""",
    ),
    "update_in_each_micro_batch": Mistake(
        "fault",
        "update_in_window|scales_mixed|unscale_in_window",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader(4)):
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets) / 2
    scaler.scale(loss).backward()
    if i % 2:
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()  # HERE
""",
    ),
    "unscale_in_each_micro_batch": Mistake(
        "fault",
        "unscale_in_window|unscaled_twice",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader(4)):
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets) / 2
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # HERE
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if i % 2:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
        says=("look at: one unscale_, and behind it all clips",),
    ),
    "unscale_in_first_micro_batch": Mistake(
        "fault",
        "unscale_in_window",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
scaler = GradScaler("cuda", init_scale=1024.0)
for i, (inputs, targets) in enumerate(loader(4)):
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets) / 2
    scaler.scale(loss).backward()
    if i % 2 == 0:
        scaler.unscale_(optimizer)  # HERE
    else:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    "unscale_twice_in_sam": Mistake(
        "fault",
        "unscaled_twice",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
weights = list(model.parameters())
for inputs, targets in loader():
    for is_second in (False, True):
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # HERE
        if not is_second:
            moves = [0.05 * p.grad for p in weights]
        sign = -1 if is_second else 1
        with torch.no_grad():
            for p, move in zip(weights, moves):
                p.add_(move, alpha=sign)
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "divides_by_the_scale_too": Mistake(
        "fault",
        "depends_on_scale",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    for p in model.parameters():
        p.grad /= scaler.get_scale()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)  # HERE
    scaler.update()
""",
    ),
    "new_scaler_each_step": Mistake(
        "fault",
        "scaler_made_anew|no_steps",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in loader():
    scaler = GradScaler("cuda", init_scale=2.0**30)  # HERE
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "new_scaler_each_epoch_of_one_step": Mistake(
        "suspicion",
        "scaler_made_anew",
        """\
def train_step(inputs, targets):
    scaler = GradScaler("cuda", init_scale=1024.0)  # HERE
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in loader():
    train_step(*batch)
""",
    ),
    "log_of_half_plus_eps_late": Mistake(
        "fault",
        "no_steps",
        """\
def focal(logits, targets):
    p = torch.sigmoid(logits)
    positive = -targets * (1 - p) ** 2 * torch.log(p + 1e-8)
    negative = -(1 - targets) * p**2 * torch.log(1 - p + 1e-8)  # HERE
    return (positive + negative).mean()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
scaler = torch.amp.GradScaler("cpu")
for i in range(60):
    inputs = torch.randn(64, 10) * 8
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(inputs)
    loss = focal(logits, (inputs[:, :1] > 0).to(logits.dtype))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "root_of_a_negative_variance": Mistake(
        "fault",
        "no_steps",
        """\
class Norm(nn.Module):
    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) / torch.sqrt(variance + 1e-5)  # HERE


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv1d(1, 16, 3, padding=1), Norm()
        self.second, self.last = nn.Conv1d(16, 16, 3, padding=1), nn.Linear(16, 2)

    def forward(self, x):
        hidden = torch.relu(self.norm(self.first(x)))
        return self.last(torch.relu(self.second(hidden)).mean(-1))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu")
for i in range(24):
    targets = torch.randint(0, 2, (16,))
    spread = 0.05 + 0.1 * targets[:, None, None]
    inputs = 30 + spread * torch.randn(16, 1, 40)
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "generator_is_stepped_by_the_other_scaler": Mistake(
        "fault",
        "scales_mixed",
        """\
G = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
D = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
opt_g = torch.optim.Adam(G.parameters(), 1e-3)
opt_d = torch.optim.Adam(D.parameters(), 1e-3)
scaler_g, scaler_d = GradScaler("cpu", init_scale=2.0**12), GradScaler("cpu")
bce = nn.BCEWithLogitsLoss()
for i in range(50):
    real = torch.randn(32, 2) + 2
    with torch.autocast("cpu", dtype=torch.float16):
        fake = G(torch.randn(32, 6))
        loss = bce(D(real), torch.ones(32, 1))
        loss = loss + bce(D(fake.detach()), torch.zeros(32, 1))
    opt_d.zero_grad()
    scaler_d.scale(loss).backward()
    scaler_d.step(opt_d)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = bce(D(fake), torch.ones(32, 1))
    opt_g.zero_grad()
    scaler_d.scale(loss).backward()
    scaler_g.step(opt_g)  # HERE
    scaler_d.update()
    scaler_g.update()
""",
    ),
    "optimizer_in_backward_steps_itself": Mistake(
        "fault",
        "step_without_scaler",
        """\
model = net()
scaler = GradScaler("cuda", init_scale=1024.0)
optimizers = {p: torch.optim.Adam([p], lr=1e-3) for p in model.parameters()}


def step(p):
    optimizers[p].step()  # HERE
    optimizers[p].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(step)
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
""",
    ),
    "generator_steps_itself": Mistake(
        "fault",
        "step_without_scaler",
        """\
G = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
D = nn.Sequential(nn.Linear(3, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
opt_g = torch.optim.SGD(G.parameters(), lr=1e-3)
opt_d = torch.optim.SGD(D.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")


def train_discriminator(real, fake):
    opt_d.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = torch.relu(1 - D(real)).mean() + torch.relu(1 + D(fake)).mean()
    scaler.scale(loss).backward()
    scaler.step(opt_d)


def train_generator(noise):
    opt_g.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = -D(G(noise)).mean()
    scaler.scale(loss).backward()
    opt_g.step()  # HERE


torch.manual_seed(0)
for i in range(14):
    real, noise = torch.randn(32, 3) * 0.2 + 1, torch.randn(32, 6)
    with torch.no_grad():
        fake = G(noise)
    train_discriminator(real, fake)
    train_generator(noise)
    scaler.update()
""",
    ),
    "left_out_step_is_not_zeroed": Mistake(
        "fault",
        "not_zeroed",
        """\
model = net()
optimizer = torch.optim.Adam(model.parameters(), 2e-3)
scaler = GradScaler("cpu")
for inputs, targets in loader(2):
    with autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()  # HERE
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        scaler.update()
        continue
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    ),
    "one_kind_of_batch_is_always_skipped": Mistake(
        "fault",
        "no_steps",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader(2)):
    with autocast("cuda", dtype=torch.float16):
        outputs = model(inputs)
        loss = F.cross_entropy(outputs, targets)
        sure = -torch.log(1 - torch.sigmoid(60 * outputs) + 1e-8).mean()
    if i % 7 == 6:
        scaler.scale(loss + sure).backward()  # HERE
    else:
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
        says=("first: log outside the model,",),
    ),
    "ignores_what_the_scaler_found": Mistake(
        "fault",
        "overflow_hidden|step_without_scaler",
        """\
class Scaler(GradScaler):
    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        return optimizer.step(*args, **kwargs)


model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = Scaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "nan_to_num_of_gradients": Mistake(
        "fault",
        "overflow_hidden",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    for p in model.parameters():
        torch.nan_to_num(p.grad, nan=0, posinf=1e5, neginf=-1e5, out=p.grad)
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "nan_to_num_by_numbers_of_a_true_gradients_size": Mistake(
        "fault",
        "overflow_hidden",
        """\
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    for p in model.parameters():
        torch.nan_to_num(p.grad, nan=0, posinf=1, neginf=-1, out=p.grad)
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "nan_to_num_of_accumulated_gradients": Mistake(
        "fault",
        "overflow_hidden",
        """\
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader(4)):
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets) / 2
    scaler.scale(loss).backward()
    if i % 2:
        for p in model.parameters():
            torch.nan_to_num(p.grad, nan=0, posinf=1, neginf=-1, out=p.grad)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    "nan_to_num_in_each_micro_batch": Mistake(
        "fault",
        "overflow_hidden",
        """\
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader(4)):
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets) / 2
    scaler.scale(loss).backward()
    for p in model.parameters():
        torch.nan_to_num(p.grad, nan=0, posinf=1, neginf=-1, out=p.grad)
    if i % 2:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    "accumulates_and_steps_past_the_scaler": Mistake(
        "fault",
        "step_without_scaler",
        """\
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda", init_scale=1024.0)
for i, (inputs, targets) in enumerate(loader(4)):
    inputs[:, ::2] = 0.0  # so that some gradients are 0
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets) / 2
    scaler.scale(loss).backward()
    if i % 2:
        optimizer.step()  # HERE
        optimizer.zero_grad()
""",
        says=("2 forced overflows were stepped with",),
    ),
    "closure_with_a_scaler": Mistake(
        "fault",
        "closure",
        """\
model = net()
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
scaler = GradScaler("cuda")
for inputs, targets in loader():

    def closure():
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        return loss

    scaler.step(optimizer, closure)  # HERE
    scaler.update()
""",
    ),
    "steps_what_took_no_part": Mistake(
        "fault",
        "no_gradients",
        """\
critic, generator = net(1), net(8)
opt_d = torch.optim.SGD(critic.parameters(), lr=0.05)
opt_g = torch.optim.SGD(generator.parameters(), lr=0.05)
scaler = GradScaler("cuda")
for i, (real, _) in enumerate(loader()):
    opt_d.zero_grad()
    opt_g.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        fake = generator(torch.randn(len(real), 8))
        d_fake = critic(fake.detach())
        loss = F.softplus(-critic(real)).mean() + F.softplus(d_fake).mean()
    scaler.scale(loss).backward()
    scaler.step(opt_d)
    if i % 2 == 0:
        with autocast("cuda", dtype=torch.float16):
            loss = F.softplus(-critic(fake)).mean()
        scaler.scale(loss).backward()
    scaler.step(opt_g)  # HERE
    scaler.update()
""",
    ),
    "constant_loss_of_an_empty_batch": Mistake(
        "fault",
        "constant_loss",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader(4)):
    rows = targets >= (0 if i != 12 else 4)
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        outputs = model(inputs)
        loss = torch.zeros((), requires_grad=True)
        if rows.any():
            loss = F.cross_entropy(outputs[rows], targets[rows])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "new_scaler_each_epoch": Mistake(
        "suspicion",
        "scaler_made_anew",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    scaler = GradScaler("cuda")  # HERE
    for inputs, targets in loader():
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    ),
    "multiplies_by_a_number_and_never_divides": Mistake(
        "suspicion",
        "scale_not_divided",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    (loss * 1024).backward()  # HERE
    optimizer.step()
""",
    ),
    "reports_the_scaled_loss": Mistake(
        "suspicion",
        "scaled_loss_read",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
total = 0.0
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    loss = scaler.scale(loss)
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
    total += loss.item()  # HERE
print(total)
""",
    ),
    "scale_grows_after_each_step": Mistake(
        "suspicion",
        "skips_often",
        """\
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scaler = GradScaler("cpu", growth_interval=1)
for step in range(80):
    inputs = 3 * torch.randn(32, 16)
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        loss = F.mse_loss(model(inputs), 4 * inputs[:, :1])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "lbfgs_steps_past_the_scaler": Mistake(
        "fault",
        "closure",
        """\
model = net()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
scaler = GradScaler("cuda", init_scale=1024.0)
for inputs, targets in loader():

    def closure():
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        return loss

    optimizer.step(closure)
    scaler.update()
""",
    ),
    # Gradients that do not reach their step, or reach it twice.
    "zero_grad_in_each_micro_batch": Mistake(
        "fault",
        "zero_grad_in_window",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader(4)):
    optimizer.zero_grad()  # HERE
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets) / 2
    scaler.scale(loss).backward()
    if i % 2:
        scaler.step(optimizer)
        scaler.update()
""",
    ),
    "zero_grad_before_the_step": Mistake(
        "fault",
        "zero_grad_in_window",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    optimizer.zero_grad(set_to_none=False)  # HERE
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "zero_grad_to_none_before_the_step": Mistake(
        "fault",
        "zero_grad_in_window",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    optimizer.zero_grad()  # HERE
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "never_zeroes": Mistake(
        "fault",
        "not_zeroed",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()  # HERE
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "zeroes_one_of_two_optimizers": Mistake(
        "fault",
        "not_zeroed",
        """\
body, head = net(8), nn.Linear(8, 4)
opt_b = torch.optim.SGD(body.parameters(), lr=0.01)
opt_h = torch.optim.SGD(head.parameters(), lr=0.01)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    opt_b.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(head(body(inputs)), targets)
    scaler.scale(loss).backward()  # HERE
    scaler.step(opt_b)
    scaler.step(opt_h)
    scaler.update()
""",
    ),
    "decays_the_gradients_in_place_of_zeroing": Mistake(
        "fault",
        "not_zeroed",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    for p in model.parameters():
        p.grad.mul_(0.9)
""",
    ),
    "only_the_model_is_a_copy": Mistake(
        "fault",
        "other_parameters",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = copy.deepcopy(model)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # HERE
    scaler.update()
""",
    ),
    "features_are_detached": Mistake(
        "suspicion",
        "cut_off|other_parameters",
        """\
body, head = net(8), nn.Linear(8, 4)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        features = body(inputs)
        loss = F.cross_entropy(head(features.detach()), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "loss_is_rewrapped": Mistake(
        "fault",
        "loss_cut_off",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    loss = torch.tensor(loss.item(), requires_grad=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # HERE
    scaler.update()
""",
    ),
    "loss_is_detached": Mistake(
        "fault",
        "loss_cut_off",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    loss = loss.detach()
    scaler.scale(loss).backward()  # HERE
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "never_steps": Mistake(
        "fault",
        "step_missing",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()  # HERE
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
""",
    ),
    "assigns_unscaled_gradients": Mistake(
        "fault",
        "depends_on_scale|unscaled_loss",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
weights = list(model.parameters())
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss)
    for p, g in zip(weights, torch.autograd.grad(loss, weights)):
        p.grad = g
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    # Schedules.
    "schedule_moves_on_skipped_steps": Mistake(
        "fault",
        "schedule_on_skipped",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()  # HERE
""",
    ),
    "one_cycle_moves_on_skipped_steps": Mistake(
        "fault",
        "schedule_on_skipped",
        """\
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=12)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scheduler.step()  # HERE
    scaler.update()
""",
    ),
    "warmup_in_first_epoch_moves_on_skipped_steps": Mistake(
        "fault",
        "schedule_on_skipped",
        """\
def train_one_epoch(epoch):
    warmup = None
    if epoch == 0:
        warmup = lr_scheduler.LinearLR(optimizer, 0.001, total_iters=11)
    for inputs, targets in data:
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if warmup is not None:
            warmup.step()  # HERE


model, data = net(), loader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scheduler = lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)
scaler = torch.cuda.amp.GradScaler()
for epoch in range(2):
    train_one_epoch(epoch)
    scheduler.step()
""",
    ),
    "rate_from_the_norm_of_scaled_gradients": Mistake(
        "fault",
        "depends_on_scale",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    norm = math.hypot(*(p.grad.norm() for p in model.parameters()))
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (1 + norm)
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "schedule_moves_where_the_scale_fell": Mistake(
        "fault",
        "schedule_on_skipped",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < scale:
        scheduler.step()  # HERE
""",
    ),
    # Checkpoints.
    "scale_is_not_saved": Mistake(
        "fault",
        "scaler_not_saved",
        """\
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for epoch in range(2):
    for inputs, targets in loader():
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    scaler.state_dict()  # which nothing keeps
    torch.save({"image_scale": 1.5, **state}, io.BytesIO())  # HERE
""",
    ),
    # What is computed in what.
    "half_model_with_a_scaler": Mistake(
        "fault",
        "half_weights",
        """\
model = net().half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs.half()), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "half_model_loses_its_updates": Mistake(
        "fault|suspicion",
        "half_weights",
        """\
model = net().half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
for inputs, targets in loader():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs.half()).float(), targets)
    loss.backward()
    optimizer.step()
""",
    ),
    "half_model_with_small_eps": Mistake(
        "fault",
        "half_weights|not_finite",
        """\
model = net().half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8)
for inputs, targets in loader():
    optimizer.zero_grad()
    inputs[:, 0] = 0
    loss = F.cross_entropy(model(inputs.half()).float(), targets)
    loss.backward()
    optimizer.step()
""",
    ),
    "bfloat16_weights_under_autocast_lose_updates": Mistake(
        "fault|suspicion",
        "half_weights",
        """\
model = net().bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
""",
    ),
    "rounds_its_weights": Mistake(
        "fault|suspicion",
        "half_weights",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for inputs, targets in loader():
    model.half()
    outputs = model(inputs.half())
    loss = F.cross_entropy(outputs.float(), targets)
    optimizer.zero_grad()
    loss.backward()
    model.float()
    for p in model.parameters():
        p.grad = p.grad.float()
    optimizer.step()
""",
    ),
    "autocast_around_the_loss_alone": Mistake(
        "suspicion",
        "autocast_covers_nothing",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    outputs = model(inputs)
    with autocast("cuda", dtype=torch.float16):  # HERE
        loss = F.cross_entropy(outputs, targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "autocast_is_not_entered": Mistake(
        "suspicion",
        "autocast_covers_nothing",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    autocast("cuda", dtype=torch.float16)
    loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "backward_in_autocast": Mistake(
        "suspicion",
        "autocast_backward",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()  # HERE
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "one_region_around_the_training": Mistake(
        "fault",
        "stale_casts",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
with autocast("cuda", dtype=torch.float16):  # HERE
    for inputs, targets in loader():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    ),
    "no_scaler": Mistake(
        "suspicion",
        "no_loss_scale",
        """\
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):  # HERE
        loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
""",
    ),
    "scaler_is_never_used": Mistake(
        "suspicion",
        "no_loss_scale",
        """\
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")  # HERE
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
""",
    ),
    "scaler_is_switched_off_in_float16": Mistake(
        "suspicion",
        "no_loss_scale",
        """\
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda", enabled=False)  # HERE
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "mask_beyond_float16": Mistake(
        "fault",
        "beyond_float16",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        scores = model(inputs)
        scores = scores.masked_fill(torch.zeros(4, dtype=torch.bool), -1e9)  # HERE
        loss = F.cross_entropy(scores, targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "sigmoid_and_bce": Mistake(
        "fault",
        "unsafe_to_autocast",
        """\
model = nn.Sequential(net(1), nn.Sigmoid())
criterion = nn.BCELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = criterion(model(inputs)[:, 0], (targets > 1).float())  # HERE
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "writes_half_into_float32": Mistake(
        "fault",
        "mixed_dtypes",
        """\
experts = nn.ModuleList([net(), net()])
optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        outputs = torch.zeros(len(inputs), 4)
        for i, expert in enumerate(experts):
            rows = (inputs[:, 0] > 0) == bool(i)
            outputs[rows] = expert(inputs[rows])  # HERE
        loss = F.cross_entropy(outputs, targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "half_output_outside_of_autocast": Mistake(
        "fault",
        "mixed_dtypes",
        """\
body, head = net(8), nn.Linear(8, 4)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        features = body(inputs)
    loss = F.cross_entropy(head(features), targets)  # HERE
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "custom_function_without_casts": Mistake(
        "fault",
        "mixed_dtypes",
        """\
class MyMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad.mm(b.t()), a.t().mm(grad)  # HERE


weight = nn.Parameter(torch.randn(8, 4) * 0.1)
optimizer = torch.optim.SGD([weight], lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(MyMM.apply(inputs, weight), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    # Numbers that float16 does not have.
    "activations_overflow": Mistake(
        "fault",
        "no_steps|not_finite",
        """\
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for inputs, targets in loader(4):
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(3e5 * inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "scores_overflow": Mistake(
        "fault",
        "no_steps|not_finite",
        """\
q, k, head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
model = nn.ModuleList([q, k, head])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for inputs, targets in loader(4):
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        scores = q(400 * inputs) @ k(400 * inputs).t()
        loss = F.cross_entropy(head(scores.softmax(1) @ inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        says=("look at: float32 from there",),
    ),
    "eps_is_zero_in_half": Mistake(
        "fault",
        "no_steps|not_finite",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        outputs = torch.relu(model(inputs) - 0.5)
        share = outputs / (outputs.mean(1, keepdim=True) + 1e-8)
        loss = F.cross_entropy(share, targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        says=("look at: float32 from there",),
    ),
    "log_of_a_half_probability": Mistake(
        "fault|suspicion",
        "no_steps|not_finite",
        """\
model = net(1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for inputs, targets in loader(3):
    optimizer.zero_grad()
    labels = (targets > 1).float()
    with autocast("cuda", dtype=torch.float16):
        p = torch.sigmoid(500 * model(inputs)[:, 0]).clamp(1e-4, 1 - 1e-4)
        loss = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "log_of_half_plus_eps": Mistake(
        "fault",
        "no_steps|not_finite",
        """\
model = net(1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for inputs, targets in loader(4):
    optimizer.zero_grad()
    labels = (targets > 1).float()
    with autocast("cuda", dtype=torch.float16):
        p = torch.sigmoid(500 * model(inputs)[:, 0])
        loss = labels * (p + 1e-8).log() + (1 - labels) * (1 - p + 1e-8).log()
        loss = -loss.mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "sum_of_squares_overflows": Mistake(
        "fault",
        "no_steps|not_finite|loss_16_bits",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        difference = model(inputs) - 400 * F.one_hot(targets, 4)
        loss = (difference * difference).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "loss_in_half": Mistake(
        "fault",
        "loss_16_bits",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
scaler = GradScaler("cuda")
for inputs, targets in loader(4):
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        outputs = model(inputs)
    loss = 1e5 * (outputs - inputs[:, :4].half()).abs().mean()
    scaler.scale(loss).backward()  # HERE
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "nan_in_the_data": Mistake(
        "fault",
        "no_steps|not_finite",
        """\
x[:, 5] = math.nan
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader(4):
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        OTHER_PRECISIONS,
    ),
    "mean_of_nothing": Mistake(
        "fault",
        "no_steps|not_finite",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for number, (inputs, targets) in enumerate(loader()):
    mask = targets >= (4 if number % 2 else 0)
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        losses = F.cross_entropy(model(inputs), targets, reduction="none")
        loss = (losses * mask).sum() / mask.sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        OTHER_PRECISIONS,
    ),
    "rows_that_are_all_masked": Mistake(
        "fault",
        "no_steps|not_finite",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader(4):
    mask = inputs > 0
    mask[0] = True
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        share = inputs.masked_fill(mask, -math.inf).softmax(1)
        loss = F.cross_entropy(model(share), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        OTHER_PRECISIONS,
    ),
    "loss_behind_a_mask_is_not_finite": Mistake(
        "suspicion",
        "loss_not_finite",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for number, (inputs, targets) in enumerate(loader()):
    optimizer.zero_grad()
    mask = torch.rand(8, 4) < (0.95 if number % 2 else 0.1)
    with autocast("cuda", dtype=torch.float16):
        logits = model(inputs).masked_fill(mask, float("-inf"))
        loss = -(logits.softmax(-1) + 1e-6).log().mean()
    scaler.scale(loss).backward()  # HERE
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "leaves_out_most_batches": Mistake(
        "fault",
        "left_out|no_steps",
        """\
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for number, (inputs, targets) in enumerate(loader(2)):
    if number % 4:
        inputs = 3e5 * inputs
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    if not torch.isfinite(loss):
        continue
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "validates_in_half": Mistake(
        "fault",
        "eval_16_bits",
        """\
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
model.eval()
with torch.no_grad(), autocast("cuda", dtype=torch.float16):
    total = F.cross_entropy(model(3e5 * x), y)
print("validation", total.item())
""",
    ),
    "norm_of_squares_overflows": Mistake(
        "suspicion",
        "overflow_in_forward",
        """\
class Normalized(nn.Module):
    def forward(self, hidden):
        squares = hidden * hidden  # HERE
        return hidden / torch.sqrt(squares.mean(-1, keepdim=True) + 1e-6)


model = nn.Sequential(nn.Linear(8, 16), Normalized(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(600 * inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "times_in_half": Mistake(
        "suspicion",
        "whole_numbers_rounded",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    times = torch.randint(0, 60_000, (len(inputs), 1))
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        waves = torch.sin(times.half())  # HERE
        loss = F.cross_entropy(model(inputs + waves), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "positions_times_frequencies_in_bfloat16": Mistake(
        "suspicion",
        "whole_numbers_rounded",
        """\
embedding, head = nn.Embedding(32, 16), nn.Linear(16, 32)
weights = [*embedding.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(weights, lr=1e-3)
frequencies = 1000.0 ** (-torch.arange(0, 16) / 16)
for step in range(20):
    ids = torch.randint(0, 32, (2, 300))
    with autocast("cuda", dtype=torch.bfloat16):
        positions = torch.arange(300.0)[:, None]
        angles = positions @ frequencies[None]  # HERE
        hidden = embedding(ids) * angles.cos()
        loss = F.cross_entropy(head(hidden).flatten(0, 1), ids.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    # Gradients of gradients.
    "penalty_of_scaled_gradients": Mistake(
        "fault",
        "depends_on_scale",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda", init_scale=256.0)
for inputs, targets in loader():
    optimizer.zero_grad()
    inputs.requires_grad_()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    (g,) = torch.autograd.grad(scaler.scale(loss), inputs, create_graph=True)
    loss = loss + g.norm(2, dim=1).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "weights_of_tasks_by_norms_of_scaled_gradients": Mistake(
        "fault",
        "depends_on_scale",
        """\
trunk, first, second = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)
tasks = nn.Parameter(torch.ones(2))
weights = [w for each in (trunk, first, second) for w in each.parameters()]
optimizer = torch.optim.Adam(weights, lr=1e-3)
of_tasks = torch.optim.SGD([tasks], lr=0.025)
scaler = GradScaler("cuda", init_scale=512.0)
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        hidden = trunk(inputs).relu()
        losses = [
            F.cross_entropy(first(hidden), targets),
            F.l1_loss(second(hidden).float(), inputs[:, :1]),
        ]
    optimizer.zero_grad()
    total = sum(w * each for w, each in zip(tasks.detach(), losses))
    scaler.scale(total).backward(retain_graph=True)
    norms = [
        torch.autograd.grad(
            scaler.scale(w * each), trunk.weight, create_graph=True, retain_graph=True
        )[0].norm()
        for w, each in zip(tasks, losses)
    ]
    difference = (norms[0] - norms[1]).abs()
    (tasks.grad,) = torch.autograd.grad(difference, tasks)
    of_tasks.step()  # HERE
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "inner_step_with_scaled_gradients": Mistake(
        "fault",
        "depends_on_scale",
        """\
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = GradScaler("cuda", init_scale=256.0)
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        inner = F.cross_entropy(model(inputs[:4]), targets[:4])
    weights = list(model.parameters())
    grads = torch.autograd.grad(scaler.scale(inner), weights, create_graph=True)
    fast = [w - 0.01 * g for w, g in zip(weights, grads)]
    with autocast("cuda", dtype=torch.float16):
        outer = F.cross_entropy(F.linear(inputs[4:], *fast), targets[4:])
    optimizer.zero_grad()
    scaler.scale(outer).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "bfloat16_with_a_scaler": Mistake(
        "suspicion",
        "bfloat16_with_scaler",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")  # HERE
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "outlier_in_running_statistics": Mistake(
        "fault",
        "not_finite",
        """\
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader()):
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs * (3e5 if i == 11 else 1)), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "inputs_beyond_float16": Mistake(
        "fault",
        "no_steps",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader(4):
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(3e5 * inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        says=(
            "first: a cast in 0 (Linear), beyond float16",
            "tried: the loss is finite in float32 and in bfloat16",
            "look at: float32 from there",
            "or dtype=torch.bfloat16",
        ),
    ),
    "one_region_around_all_forwards": Mistake(
        "fault",
        "stale_casts",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda", enabled=True)
with autocast("cuda", dtype=torch.float16):  # HERE
    for inputs, targets in loader():
        loss = F.cross_entropy(model(inputs), targets)
        with autocast("cuda", enabled=False):
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
    ),
    "one_region_around_all_forwards_in_bfloat16": Mistake(
        "fault",
        "stale_casts",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda", enabled=False)
with autocast("cuda", dtype=torch.bfloat16):  # HERE
    for inputs, targets in loader():
        loss = F.cross_entropy(model(inputs), targets)
        with autocast("cuda", enabled=False):
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
    ),
    "zeroes_after_applied_steps_alone": Mistake(
        "fault",
        "not_zeroed",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()  # HERE
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= scale:
        optimizer.zero_grad()
""",
    ),
    "zero_grad_in_the_last_micro_batch": Mistake(
        "fault",
        "zero_grad_in_window",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader(2)):
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets) / 4
    if i % 4 == 3:
        optimizer.zero_grad()  # HERE
    scaler.scale(loss).backward()
    if i % 4 == 3:
        scaler.step(optimizer)
        scaler.update()
""",
    ),
    "two_scalers_leave_gradients_in_one_critic": Mistake(
        "fault",
        "scales_mixed",
        """\
model, critic = net(), net(1, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
other = torch.optim.SGD(critic.parameters(), lr=0.1)
scaler, second = GradScaler("cuda"), GradScaler("cuda", init_scale=256.0)
for inputs, _ in loader():
    with autocast("cuda", dtype=torch.float16):
        outputs = model(inputs)
        loss = F.softplus(-critic(outputs)).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.softplus(critic(outputs.detach())).mean()
    second.scale(loss).backward()
    second.step(other)
    second.update()
    other.zero_grad()
""",
    ),
    "surrogate_of_scaled_gradients_is_scaled_again": Mistake(
        "fault",
        "depends_on_scale",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for _ in range(12):
    inputs = torch.randn(16, 8)
    with torch.no_grad(), autocast("cuda", dtype=torch.float16):
        made = torch.cat([model(chunk) for chunk in inputs.chunk(4)])
    made = made.float().requires_grad_()
    loss = F.cross_entropy(made @ made.roll(1, 0).T, torch.arange(16))
    scaler.scale(loss).backward()
    for chunk, gradient in zip(inputs.chunk(4), made.grad.chunk(4)):
        with autocast("cuda", dtype=torch.float16):
            outputs = model(chunk)
        scaler.scale((outputs.float() * gradient).sum()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    ),
    "schedule_of_its_own_moves_on_skipped_steps": Mistake(
        "fault",
        "schedule_on_skipped",
        """\
class Poly(lr_scheduler.LRScheduler):
    def get_lr(self):
        return [0.1 * (1 - min(self.last_epoch, 40) / 40)]

    def step(self, epoch=None):
        self.last_epoch += 1
        self.optimizer.param_groups[0]["lr"] = self.get_lr()[0]


model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = Poly(optimizer)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()  # HERE
""",
    ),
    "loss_is_made_of_new_tensors": Mistake(
        "fault",
        "loss_cut_off",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        losses = [F.cross_entropy(model(inputs), targets).item() for _ in range(2)]
    loss = torch.tensor(losses, requires_grad=True).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # HERE
    scaler.update()
""",
    ),
    "only_the_model_is_a_copy_in_bfloat16": Mistake(
        "fault",
        "other_parameters",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = copy.deepcopy(model)
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()  # HERE
""",
    ),
    "zero_grad_before_the_step_in_bfloat16": Mistake(
        "fault",
        "zero_grad_in_window",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.zero_grad()  # HERE
    optimizer.step()
""",
    ),
    "update_is_left_out_with_the_step": Mistake(
        "fault",
        "update_missing",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # HERE
    if nn.utils.clip_grad_norm_(model.parameters(), 1.0) < 0.1:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
""",
    ),
    "updates_after_every_tenth_step": Mistake(
        "fault",
        "update_missing",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader()):
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # HERE
    if i % 10 == 0:
        scaler.update()
    optimizer.zero_grad()
""",
    ),
    "sets_gradients_and_never_updates": Mistake(
        "fault",
        "update_missing",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    weights = [*model.parameters()]
    gradients = torch.autograd.grad(scaler.scale(loss), weights)
    for weight, gradient in zip(weights, gradients):
        weight.grad = gradient
    scaler.step(optimizer)  # HERE
""",
    ),
    "steps_twice_in_the_third_batch": Mistake(
        "fault",
        "step_twice",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader()):
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    for _ in range(2 if i == 2 else 1):
        scaler.step(optimizer)  # HERE
    scaler.update()
    optimizer.zero_grad()
""",
    ),
    "half_model_without_amp": Mistake(
        "suspicion",
        "half_weights",
        """\
model = net().half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in loader():
    loss = F.cross_entropy(model(inputs.half()).float(), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    "closure_before_any_loss_is_scaled": Mistake(
        "fault",
        "closure",
        """\
model = net()
optimizer = torch.optim.LBFGS(model.parameters())
scaler = GradScaler("cuda")
for inputs, targets in loader():

    def closure():
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        return loss

    scaler.step(optimizer, closure)  # HERE
    scaler.update()
""",
    ),
    "clamps_scaled_gradients_by_hand": Mistake(
        "fault",
        "depends_on_scale",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    for p in model.parameters():
        p.grad.clamp_(-1.0, 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "masks_what_is_not_finite": Mistake(
        "fault",
        "overflow_hidden",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    for p in model.parameters():
        p.grad[~torch.isfinite(p.grad)] = 0
    scaler.step(optimizer)  # HERE
    scaler.update()
""",
    ),
    "hooks_clamp_scaled_gradients": Mistake(
        "fault",
        "depends_on_scale|overflow_hidden",
        """\
model = net()
for p in model.parameters():
    p.register_hook(lambda gradient: gradient.clamp(-1.0, 1.0))
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
    ),
    "hook_of_a_state_clamps_scaled_gradients": Mistake(
        "fault",
        "depends_on_scale",
        """\
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.hidden = nn.Embedding(20, 24), nn.Linear(48, 24)
        self.outside = nn.Linear(24, 20)

    def forward(self, words):
        state, outputs = torch.zeros(len(words), 24), []
        for word in words.unbind(1):
            state = self.hidden(torch.cat([self.inside(word), state], 1)).tanh()
            state.register_hook(lambda gradient: gradient.clamp(-1, 1))
            outputs.append(self.outside(state))
        return torch.stack(outputs, 1)


model = Recurrent()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scaler = GradScaler("cuda")
for _ in range(10):
    words = torch.randint(0, 20, (8, 8))
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(words).reshape(-1, 20), words.reshape(-1))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "scaler_steps_lbfgs_with_a_closure": Mistake(
        "fault",
        "closure",
        """\
model = net()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
scaler = GradScaler("cuda")


def closure():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()  # HERE
    return loss


for _ in range(10):
    closure()
    scaler.step(optimizer, closure)
    scaler.update()
""",
    ),
    "sam_whose_skipped_step_leaves_its_move": Mistake(
        "fault",
        "no_steps|not_finite",
        """\
class SAM(torch.optim.SGD):
    def ascend(self):
        weights = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in weights]).norm()
        for p in weights:
            self.state[p]["move"] = p.grad * (0.05 / (norm + 1e-12))
            p.data.add_(self.state[p]["move"])

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(self.state[p]["move"])
        super().step(closure)


model = net()
optimizer = SAM(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    for moves in (optimizer.ascend, lambda: scaler.step(optimizer)):
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        moves()
    scaler.update()
""",
        ("left out",),
    ),
    "stops_early_by_a_scaled_validation": Mistake(
        "suspicion",
        "scaled_loss_read",
        """\
model, best = net(), math.inf
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for _ in range(2):
    for inputs, targets in loader():
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad(), autocast("cuda", dtype=torch.float16):
        loss = scaler.scale(F.cross_entropy(model(x), y)).item()  # HERE
    if loss > best:
        break
    best = loss
""",
    ),
    "resumes_without_the_scale": Mistake(
        "suspicion",
        "scaler_not_loaded",
        """\
kept = io.BytesIO()
for part in range(2):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cuda")
    if part:
        kept.seek(0)
        saved = torch.load(kept, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])  # HERE
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
    ),
    "clips_gradients_that_are_set": Mistake(
        "fault",
        "depends_on_scale",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
weights = [*model.parameters()]
for inputs, targets in loader():
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    gradients = torch.autograd.grad(scaler.scale(loss), weights)
    for weight, gradient in zip(weights, gradients):
        weight.grad = gradient
    nn.utils.clip_grad_norm_(weights, 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "schedule_of_an_optimizer_that_clips": Mistake(
        "fault",
        "schedule_on_skipped",
        """\
class Clipping(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                nn.utils.clip_grad_norm_(p, max_norm=1.0)
        return super().step(closure)


model = net()
optimizer = Clipping(model.parameters(), lr=0.1)
schedule = lr_scheduler.StepLR(optimizer, 4)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()  # HERE
""",
    ),
    "zeroes_by_hand_in_a_window": Mistake(
        "fault",
        "zero_grad_in_window",
        """\
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for i, (inputs, targets) in enumerate(loader(4)):
    for p in model.parameters():
        p.grad = None
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets) / 2
    scaler.scale(loss).backward()
    if i % 2:
        scaler.step(optimizer)
        scaler.update()
""",
    ),
    "starts_at_an_unscaled_loss_too": Mistake(
        "fault",
        "unscaled_loss",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    torch.autograd.backward([scaler.scale(loss), 0.1 * loss])  # HERE
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "saves_one_of_two_scalers": Mistake(
        "fault",
        "scaler_not_saved",
        """\
models = net(), net()
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
scalers = GradScaler("cuda"), GradScaler("cuda", init_scale=1024.0)
for inputs, targets in loader():
    for model, scaler in zip(models, scalers):
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
    for optimizer, scaler in zip(optimizers, scalers):
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
state = [each.state_dict() for each in (*optimizers, scalers[0])]
torch.save(state, io.BytesIO())  # HERE
""",
    ),
    "zeroes_each_backward_without_a_loader": Mistake(
        "suspicion",
        "zero_grad_in_window",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for i in range(24):
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    if i % 3 == 2:
        scaler.step(optimizer)
        scaler.update()
""",
    ),
    "finite_loss_in_half": Mistake(
        "suspicion",
        "loss_16_bits",
        """\
critic = net(1)
optimizer = torch.optim.SGD(critic.parameters(), lr=1e-4)
scaler = GradScaler("cuda", init_scale=1024.0)
for inputs, _ in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = -critic(inputs).mean()
    scaler.scale(loss).backward()  # HERE
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "random_slopes": Mistake(
        "suspicion",
        "no_16_bit_kernel",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        outputs = F.rrelu(model(inputs), training=True)  # HERE
        loss = F.cross_entropy(outputs, targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "average_of_gradients_that_overflowed": Mistake(
        "fault",
        "no_steps",
        """\
model, kept = net(), {}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda", init_scale=1024.0)
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    for p in model.parameters():
        kept[p] = 0.5 * kept.get(p, 0.0) + 0.5 * p.grad
        p.grad += kept[p]
    scaler.step(optimizer)
    scaler.update()
""",
        says=("look at: the losses are finite",),
    ),
    "steps_past_the_scaler": Mistake(
        "fault",
        "step_without_scaler",
        """\
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = GradScaler("cuda", init_scale=1024.0)
for inputs, targets in loader(4):
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    optimizer.step()  # HERE
    optimizer.zero_grad()
""",
        says=("2 forced overflows were stepped with",),
    ),
    "clip_with_a_moving_limit": Mistake(
        "fault",
        "clip_scaled",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    limit = 1.0 + 0.1 * float(torch.rand(()))
    nn.utils.clip_grad_norm_(model.parameters(), limit)  # HERE
    scaler.step(optimizer)
    scaler.update()
""",
        says=(
            "look at: scaler.unscale_(optimizer), then the clip: both after the last",
        ),
    ),
    "unscales_below_its_clip": Mistake(
        "fault",
        "clip_scaled",
        """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for inputs, targets in loader():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # HERE
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "clip_in_a_trainer": Mistake(
        "fault",
        "clip_scaled",
        """\
class Trainer:
    def __init__(self):
        self.encoder = net()
        self.opt = torch.optim.SGD(self.encoder.parameters(), lr=0.1)
        self.amp = GradScaler("cuda")

    def train(self):
        for inputs, targets in loader():
            self.opt.zero_grad()
            with autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(self.encoder(inputs), targets)
            self.amp.scale(loss).backward()
            nn.utils.clip_grad_norm_(self.encoder.parameters(), 1.0)  # HERE
            self.amp.step(self.opt)
            self.amp.update()


Trainer().train()
""",
    ),
    "divides_in_a_closure_and_takes_an_overflow": Mistake(
        "fault",
        "not_finite",
        """\
model = net()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
scaler = GradScaler("cuda")


def closure():
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    for p in model.parameters():
        p.grad /= scaler.get_scale()
    return loss


for _ in range(10):
    optimizer.step(closure)
""",
        misleading=("which no loss scale allows",),
    ),
}
