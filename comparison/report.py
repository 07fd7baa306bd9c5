"""
A comparison as text: report.md, and report.html with its plots in it, which needs no network.

The verdicts come first. No statistics are computed here.
"""

import contextlib
import datetime
import math
import os
from html import escape

from comparison import charts
from comparison.charts import MINUS, seeds_text
from comparison.record import METRIC
from comparison.verdict import LEAST_SEEDS, RULES
from lib.files import named, printable, whole_file
from lib.tables import markdown_table

# --- words and numbers ----------------------------------------------------------------------------

TIMES = '\N{MULTIPLICATION SIGN}'


def plain(value, digits=4):
    return '' if value is None else f'{value:.{digits}f}'


def signed(value):
    return '' if value is None else f'{value:+.4f}'.replace('-', MINUS)


def p_text(p, equals=''):
    if p is None:
        return ''
    return '< 0.0001' if p < 1e-4 else f'{equals}{p:.4f}'


def interval(contrast, end='_holm'):
    """The 95% interval of a contrast; end: '' for the uncorrected one."""
    low, high = contrast[f'low{end}'], contrast[f'high{end}']
    return '' if low is None else f'{signed(low)} to {signed(high)}'


# Of runs whose settings this code does not know: what they stand for cannot be counted.
OLDER = 'older settings'


def listed(values):
    return ', '.join(f'{value:g}' if isinstance(value, float) else str(value) for value in values)


# --- the verdicts ---------------------------------------------------------------------------------


def headline(comparison):
    """The verdicts for the terminal, a line each."""
    lines = [f'{comparison["title"]}. {state(comparison)}']
    for contrast in comparison['contrasts'].values():
        lines.append('  ' + ' '.join(sentences(comparison, contrast)))
    return '\n'.join(map(printable, lines + problem_lines(comparison)))


def problem_lines(comparison):
    return [f'{name}: {problem}' for name, problem in comparison['problems'].items()]


def state(comparison):
    """Whether it has finished, what the arms are, and whether one code trained them all."""
    words = []
    for name, arm in comparison['arms'].items():
        changes = ' '.join(f'{key}={value}' for key, value in arm['changes'].items())
        words.append(f'{name} ({changes})' if changes else name)
    finished = 'Not finished' if comparison['problems'] else 'Finished'
    text = f'{finished}. Arms: {"; ".join(words)}. The first is the baseline.'
    if comparison['domains']:
        text += f' Losses: mean over domains: {", ".join(comparison["domains"])}.'
    return f'{text} {code_text(comparison["code"])}'.strip()


def code_text(codes):
    """Which code how many runs are of, {code: runs}; '' where it is one."""
    if len(codes) < 2:
        return ''
    parts = [f'{count} of {code}' for code, count in codes.items()]
    return f'The runs are of different code: {"; ".join(parts)}.'


def sentences(comparison, contrast):
    """[who wins, by which numbers, why it is undecided, what was skipped, at what cost], without what is
    not known."""
    parts = [
        verdict(comparison, contrast),
        evidence(contrast),
        doubt(contrast),
        skipped(comparison, contrast),
        cost(comparison, contrast),
    ]
    return [part for part in parts if part]


def verdict(comparison, contrast):
    ours, theirs, word = contrast['ours'], contrast['theirs'], contrast['verdict']
    end = ''
    if ours in comparison['arms']:
        brevity = how_short(comparison['arms'][ours])
        rates = [comparison['arms'][name]['rate'] for name in (ours, theirs)]
        if not {ours, theirs} <= comparison['tuning'].keys() and rates[0] != rates[1]:
            end = f' at rates that were not tuned ({listed(rates)})'
        end += brevity and f' after {brevity}'
    if word == 'undecided':
        return f'{ours} against {theirs}{end}: undecided.'
    if ours not in comparison['arms']:  # a lead
        losses = [mean for mean, _ in contrast['losses']]
        gain = 'lost' if min(losses) > 0 else 'gained'
        is_less = (word == 'better') == (gain == 'lost')
        word = {'better': 'lower', 'worse': 'higher'}[word]
        end = f': {"less" if is_less else "more"} is {gain} there'
    return f'{ours} is {word} than {theirs} by {abs(contrast["mean"]):.4f} nats{end}.'


FEW_TOKENS = 5  # a parameter


def how_short(arm):
    """How little an arm's runs saw, in words; '' where that is more, or where it is not known."""
    tokens, parameters = arm['tokens'], arm['parameters']
    if not parameters or tokens >= FEW_TOKENS * parameters:
        return ''
    return f'{arm["steps"]:,} steps, {tokens:,} tokens, {tokens / parameters:.2g} per parameter'


def evidence(contrast):
    """The numbers behind the verdict: the losses, the spread between seeds, the corrected interval."""
    if contrast['mean'] is None:
        return ''
    (ours, our_sd), (theirs, their_sd) = contrast['losses']
    text = f'Validation loss {plain(ours)} against {plain(theirs)}'
    if contrast['ours'].startswith('('):
        text = f'Differences of losses {signed(ours)} and {signed(theirs)}'
    if our_sd and their_sd:
        text += f' (standard deviation between seeds {plain(our_sd)} and {plain(their_sd)})'
    text += f', difference {signed(contrast["mean"])}'
    if contrast['p_holm'] is not None:
        text += f', 95% interval {interval(contrast)} and p {p_text(contrast["p_holm"], "= ")}'
        text += f', both {contrast["by"]}'
    if contrast['p_flip'] is not None:
        text += f', p {p_text(contrast["p_flip"], "= ")} by flips of signs alone'
    return f'{text}, {seeds_text(contrast["seeds"])}.'


def doubt(contrast):
    """Why it is undecided, and what would decide it; or the seeds on which a verdict rests."""
    parts = []
    if contrast['reason']:
        parts.append(f'The reason: {contrast["reason"]}.')
    if contrast['rests_on'] and contrast['seeds'] == LEAST_SEEDS:
        parts.append(f'It rests on {LEAST_SEEDS} seeds, the fewest that give a verdict.')
    elif contrast['rests_on']:
        seeds = f'seed {" or ".join(map(str, contrast["rests_on"]))}'
        if len(contrast['rests_on']) == contrast['seeds']:
            seeds = 'any one of its seeds'
        parts.append(f'Without {seeds}, it would be undecided.')
    if contrast['smallest'] is not None:
        needed = contrast['seeds_needed']
        more = f'about {needed} seeds' if needed else 'more than 1,000 seeds'
        if needed and needed > contrast['seeds']:
            more += f', {needed - contrast["seeds"]} more'
        parts.append(
            f'These seeds would find a difference of {contrast["smallest"]:.4f} with 80% '
            f'probability; one as large as the observed one would need {more}.'
        )
    return ' '.join(parts)


def skipped(comparison, contrast):
    """Which of its two arms skipped steps, and how many; '' where none did."""
    parts = []
    for name in (contrast['ours'], contrast['theirs']):
        arm = comparison['arms'].get(name, {'skipped': {}})  # or a lead
        runs = [f'{n:,} of {arm["steps"]:,} in seed {seed}' for seed, n in arm['skipped'].items()]
        if runs:
            parts.append(f'Skipped optimizer steps of {name}: {", ".join(runs)}.')
    return ' '.join(parts)


def cost(comparison, contrast):
    """What the arm costs beside what it gains; '' for contrasts that leave the baseline out."""
    if contrast['theirs'] != comparison['baseline']:
        return ''
    ours, theirs = (comparison['arms'][contrast[name]] for name in ('ours', 'theirs'))
    if None in (ours['flops'], theirs['flops']):
        return f'Cost: not counted, because of {OLDER}.'
    ratios = []
    for fact, name in (('flops', 'matmul FLOPs'), ('cache_bytes_per_token', 'KV cache')):
        ratio = ours[fact] / theirs[fact]
        ratios.append(f'{TIMES}{ratio:.3f} {name}' if ratio != 1 else f'the same {name}')
    more = ours['parameters'] - theirs['parameters']
    parameters = f'{more:+,} parameters'.replace('-', MINUS) if more else 'as many parameters'
    return f'Cost: {", ".join(ratios)}, {parameters}.'


# --- what a reader must know ----------------------------------------------------------------------


def cautions(comparison):
    """What a reader must know before believing the verdicts."""
    plan = comparison['plan'] or {}
    notes = [str(caution) for caution in comparison['provenance'].get('caution', [])]
    if comparison['problems']:
        notes.append(
            'Not finished: a contrast gets no verdict before every planned run that its test needs has '
            'finished.'
        )
    if not plan:
        names = ', '.join(name for name in comparison['arms'] if name not in comparison['tuning'])
        untuned = f'the learning rates of {names} were not tuned here, and ' if names else ''
        notes.append(
            f'These runs were not planned as one comparison: {untuned}what is compared, and how many '
            'runs there are, may have been chosen when some of them were known.'
        )
        notes += seeds_alone(comparison)
    elif not comparison['tuning']:
        notes.append(
            'Untuned: every arm has the learning rate that it was given. An arm may win because '
            'that rate suits it; --rates tries several for each.'
        )
    for name, arm in comparison['arms'].items():
        if how_short(arm):
            notes.append(
                f'Short runs, such as those of {name}: {how_short(arm)}. Leads change with training: longer '
                'runs may say otherwise.'
            )
            break
    for arm, sweep in comparison['tuning'].items():
        if sweep['edge']:
            notes.append(
                f'The best learning rate of {arm}, {sweep["best"]:g}, is at the edge of those '
                'tried: a better one may lie beyond.'
            )
    if comparison['tuning_seeds']:
        seeds = listed(comparison['tuning_seeds'])
        notes.append(f'Seeds that only chose learning rates, and that no verdict counts: {seeds}.')
    if plan.get('runs_before'):
        notes.append(f'When the plan was written, {plan["runs_before"]} runs had begun already.')
    for seeds in plan.get('earlier_seeds', ()):
        notes.append(
            f'Seeds were added: the plan had {listed(seeds)} before. The p values assume that nobody '
            'looked at their results; who adds five until something is decided, up to 20, is wrong in 13% '
            'of cases, not 5%.'
        )
    if comparison['judgement'] == 'dunnett':
        notes += unequal_spreads(comparison['arms'])
    for fact in ('device', 'dtype', 'threads', 'torch'):
        values = comparison['provenance'].get(fact, [])
        if len(values) > 1:
            notes.append(f'The runs differ in {fact}: {listed(values)}.')
    return notes


def unequal_spreads(arms):
    """Where the spreads between seeds differ so much that it is hardly chance."""
    spreads = {name: arm['sd'] for name, arm in arms.items() if arm['sd']}
    if not spreads:
        return []
    least = min(spreads, key=spreads.get)
    most = max(spreads, key=spreads.get)
    ratio = spreads[most] / spreads[least]
    if ratio < 3:
        return []
    return [
        f'{most} scatters {ratio:.1f} times as much between seeds as {least}. '
        "Dunnett's test takes all for equal; if the baseline scatters three times as much as the others, "
        'it is wrong in 15% of cases with four arms, not 5%.'
    ]


def seeds_alone(comparison):
    """What does not count in a contrast: seeds that only one of its arms has."""
    notes, arms = [], comparison['arms']
    for contrast in comparison['contrasts'].values():
        pair = contrast['ours'], contrast['theirs']
        if pair[0] in arms and comparison['judgement'] == 'paired':
            ours, theirs = (set(arms[name]['losses']) for name in pair)
            seeds = listed(sorted(ours ^ theirs))
            if seeds:
                notes.append(
                    f'{pair[0]} against {pair[1]}: seeds that only one of them has do not count: {seeds}.'
                )
    return notes


def how_made(comparison):
    """['name: text']: how it was made."""
    plan, rule = comparison['plan'], RULES[comparison['judgement']]
    lines = [f'metric: {METRIC}, {comparison["evaluation"]}', f'rule: {rule}']
    if plan:
        contents = plan['plan']
        if contents['rule'] != rule:
            lines.append(f'rule, in the words of the plan: {contents["rule"]}')
        lines.append(f'plan: {plan["hash"]}, written {plan["date"]}, in plan.json')
        length = len(plan['diff'].splitlines())
        work_tree = f'with a diff of {length:,} lines, in plan.json' if length else 'unchanged'
        commit = f'{plan["commit"][:12]}, {work_tree}'
        if plan['commit'].startswith('unknown'):
            commit = plan['commit']  # which says why
        lines.append(f'code of the plan: commit {commit}')
        others = set(comparison['code']) - {contents['settings']['code']}
        if others:
            lines.append(f'code of some runs: another one, {listed(sorted(others))}')
    lines += [f'{name}: {listed(values)}' for name, values in comparison['provenance'].items()]
    total = datetime.timedelta(seconds=round(comparison['seconds']))
    return [*lines, f'training and evaluation took: {total}, added up over all runs']


# --- tables: (title, head, rows), cells are text --------------------------------------------------


def contrast_table(comparison):
    """The differences with their intervals, before and after the correction."""
    rows, by = [], ''
    for name, c in comparison['contrasts'].items():
        by = c['by']
        below = sum(difference < 0 for difference in c['differences'].values())
        row = [name, c['verdict'], signed(c['mean']), interval(c), p_text(c['p_holm'])]
        row += [interval(c, ''), p_text(c['p_flip']), f'{below} of {c["seeds"]}']
        rows.append(row)
    head = ['contrast', 'verdict', 'difference', f'95% interval {by}', f'p {by}']
    head += ['95% interval, uncorrected', 'p by flips of signs, uncorrected', 'seeds below 0']
    return 'Contrasts', head, rows


def arm_table(comparison):
    """With the loss of each seed."""
    arms = comparison['arms']
    every = sorted({seed for arm in arms.values() for seed in arm['losses']})
    seeds, columns = dict.fromkeys(arms, every), [f'seed {seed}' for seed in every]
    if comparison['judgement'] == 'dunnett':  # no two arms share a seed
        seeds = {name: sorted(arm['losses']) for name, arm in arms.items()}
        columns = [str(n + 1) for n in range(max(map(len, seeds.values())))]
    head = [
        'arm',
        'learning rate',
        'steps',
        'skipped steps',
        'validation loss',
        'sd over seeds',
        *columns,
    ]
    rows = []
    for name, arm in arms.items():
        rate = 'not known' if arm['rate'] is None else f'{arm["rate"]:g}'
        row = [name, rate, f'{arm["steps"]:,}', f'{sum(arm["skipped"].values()):,}']
        losses = [arm['mean'], arm['sd'], *map(arm['losses'].get, seeds[name])]
        row += [plain(loss) for loss in losses]
        rows.append(row + [''] * (len(head) - len(row)))
    return 'Arms', head, rows


def domain_table(comparison):
    """Where arms lead: many intervals, of which none was planned, so that none is a verdict."""
    rows = []
    for name, arm in comparison['arms'].items():
        for domain, lead in arm['leads'].items():
            rows.append([name, domain, signed(lead['mean']), interval(lead, '')])
    title = f'By domain, exploratory: differences from {comparison["baseline"]}'
    return title, ['arm', 'domain', 'difference', '95% interval, uncorrected'], rows


def cost_table(comparison):
    head = ['arm', 'parameters', 'matmul FLOPs', 'KV cache bytes/token', 'ms/step, as logged']
    rows = []
    for name, arm in comparison['arms'].items():
        costs = [OLDER, OLDER, OLDER]
        if arm['flops'] is not None:
            costs = [f'{arm["parameters"]:,}', f'{arm["flops"]:.4g}']
            costs.append(f'{arm["cache_bytes_per_token"]:,.0f}')
        rows.append([name, *costs, plain(arm['ms_per_step'], 1)])
    return 'Cost', head, rows


def tuning_table(comparison):
    rates = sorted({rate for t in comparison['tuning'].values() for rate in t['trials']})
    rows = []
    for arm, sweep in comparison['tuning'].items():
        row = [arm]
        for rate in rates:
            mean = sweep['means'].get(rate)
            text = 'diverged' if mean == math.inf else plain(mean)
            row.append(f'{text}, chosen' if rate == sweep['best'] else text)
        rows.append(row)
    title = 'Validation loss by learning rate, mean of the tuning seeds'
    return title, ['arm', *(f'{rate:g}' for rate in rates)], rows


CAUTIONS = 'Before you believe it'
TABLES = (contrast_table, arm_table, domain_table, cost_table, tuning_table)


def sections(comparison):
    """{title: lines, or (head, rows) of a table} below the verdicts, without those that are empty, and
    without columns in which no cell has anything."""
    contents = {CAUTIONS: cautions(comparison), 'Problems': problem_lines(comparison)}
    for make in TABLES:
        title, head, rows = make(comparison)
        columns = [column for column in zip(head, *rows, strict=True) if any(column[1:])]
        if columns:
            head, *rows = zip(*columns, strict=True)
            contents[title] = head, rows
    contents['How it was made'] = how_made(comparison)
    return {title: content for title, content in contents.items() if content}


# --- report.md and report.html --------------------------------------------------------------------


def markdown(comparison):
    lines = [f'# {comparison["title"]}', '', state(comparison), '']
    for contrast in comparison['contrasts'].values():
        first, *others = sentences(comparison, contrast)
        lines.append(f'- **{first}** {" ".join(others)}'.rstrip())
    for title, content in sections(comparison).items():
        rows = [f'- {line}' for line in content]
        if isinstance(content, tuple):
            rows = markdown_table(*content).split('\n')
        lines += ['', f'## {title}', '', *rows]
    return '\n'.join(map(printable, lines)) + '\n'


THEME = """
:root { color-scheme: light dark; --ink: #1c1f23; --soft: #5b6470; --faint: #d9dde2; --paper: #fff;
  --card: #f5f6f8; --better: #1a7f37; --worse: #b3261e; --undecided: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa4b1; --faint: #3a4049;
  --paper: #14171b; --card: #1e2329; --better: #4cc36b; --worse: #ff7b72; --undecided: #9aa4b1; } }
"""
PAGE_STYLE = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 20px 16px 60px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.45rem; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 1.05rem; margin: 32px 0 8px; }
p.sub { margin: 0 0 10px; color: var(--soft); }
.verdicts { display: grid; gap: 12px 28px; align-items: start; }
@media (min-width: 900px) { .verdicts { grid-template-columns: 5fr 6fr; }
  .forest { position: sticky; top: 12px; } }
.forest svg { width: 100%; height: auto; max-width: 520px; }
.verdict { background: var(--card); border-left: 5px solid var(--undecided); border-radius: 4px;
  padding: 10px 14px; margin: 0 0 10px; }
.verdict b { display: block; font-size: 1.05rem; }
.verdict p { margin: 2px 0 0; font-size: .93rem; }
.verdict p + p { color: var(--soft); }
.better { border-color: var(--better); } .better b { color: var(--better); }
.worse { border-color: var(--worse); } .worse b { color: var(--worse); }
.plot svg, .forest svg { border-radius: 4px; }
.plot { margin-top: 16px; }
.plot svg { width: 100%; height: auto; min-width: 560px; max-width: 720px; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
.scroll { overflow-x: auto; background: linear-gradient(to right, var(--paper) 40%, transparent) local,
  linear-gradient(to left, var(--paper) 40%, transparent) right local,
  linear-gradient(to right, var(--soft), transparent) scroll,
  linear-gradient(to left, var(--soft), transparent) right scroll;
  background-repeat: no-repeat; background-size: 48px 100%, 48px 100%, 10px 100%, 10px 100%; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px 4px 0; text-align: right; border-bottom: 1px solid var(--faint);
  white-space: nowrap; }
th { color: var(--soft); font-weight: 600; white-space: normal; vertical-align: bottom;
  overflow-wrap: normal; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 9em; }
ul { padding-left: 20px; margin: 6px 0; } li { margin: 3px 0; }
.note { background: var(--card); border-radius: 4px; padding: 6px 14px; font-size: .92rem; }
"""


def draw(comparison):
    """{name: <svg>, or '' where it shows nothing}, in the order of report.html."""
    arms = list(comparison['arms'])
    return {
        'forest': charts.contrasts_plot(comparison['contrasts'], arms),
        'rates': charts.losses_by_rate(comparison['tuning'], arms),
        'relative': charts.curves_plot(comparison['curves'], arms),
    }


def html(comparison, plots):
    """The page; plots: draw()'s."""
    title = escape(comparison['title'])
    parts = [
        '<!doctype html>',
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<title>{title}</title><style>{THEME}{PAGE_STYLE}</style></head><body>',
        f'<h1>{title}</h1>',
        f'<p class="sub">{escape(state(comparison))}</p>',
        '<div class="verdicts"><div class="forest">',
        plots['forest'],
        '</div><div class="cards">',
        *(card(comparison, contrast) for contrast in comparison['contrasts'].values()),
        '</div></div>',
    ]
    below = {title: html_section(title, lines) for title, lines in sections(comparison).items()}
    # What a reader must know stands before the plots, tables after them.
    parts.append(below.pop(CAUTIONS, ''))
    for name, plot in plots.items():
        if plot and name != 'forest':
            parts.append(f'<div class="plot scroll">{plot}</div>')  # where it would be too small
    parts += below.values()
    return '\n'.join(parts) + '\n</body></html>\n'


def card(comparison, contrast):
    first, *others = map(escape, sentences(comparison, contrast))
    body = ''.join(f'<p>{line}</p>' for line in others)
    return f'<div class="verdict {contrast["verdict"]}"><b>{first}</b>{body}</div>'


def html_section(title, content):
    """A list of lines, or a table that scrolls by itself where the page is narrow."""
    if isinstance(content, tuple):
        head, rows = content
        lines = [html_row('th', head), *(html_row('td', row) for row in rows)]
        body = f'<div class="scroll"><table>{"".join(lines)}</table></div>'
    else:
        items = ''.join(f'<li>{escape(line)}</li>' for line in content)
        body = f'<div class="note"><ul>{items}</ul></div>'
    return f'<h2>{escape(title)}</h2>{body}'


def html_row(tag, cells):
    return f'<tr>{"".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)}</tr>'


# --- on the disk ---------------------------------------------------------------------------------


def write_together(texts):
    """write_whole() several files, {path: text}: all of them or, where the disk is full, none."""
    with contextlib.ExitStack() as files:
        for path, text in texts.items():
            file = files.enter_context(whole_file(path))
            with named(path):
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())  # some file systems say only now that they are full
