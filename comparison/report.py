"""
A comparison as text: report.md, and report.html with its plots in it, which needs no network.

The verdicts come first. Nothing is computed here.
"""

import datetime
import html as escaping
import math

from comparison import charts
from comparison.charts import MINUS, TIMES
from comparison.verdict import half_width
from tables import markdown_table

# --- words and numbers ----------------------------------------------------------------------------


def signed(value, digits=4):
    if value is None:
        return ''
    return f'{value:+.{digits}f}'.replace('-', MINUS)


def plain(value, digits=4):
    return '' if value is None else f'{value:.{digits}f}'


def p_text(p):
    if p is None:
        return ''
    return '< 0.0001' if p < 1e-4 else f'{p:.4f}'


def ratio_text(ratio):
    return '' if ratio is None else f'{TIMES}{ratio:.3f}'


def duration(seconds):
    return str(datetime.timedelta(seconds=round(seconds)))


def seeds_text(count):
    return '1 seed' if count == 1 else f'{count} seeds'


def short(value):
    return f'{value:g}' if isinstance(value, float) else str(value)


def headline(comparison):
    """The verdicts for the terminal: a summary, and a line each."""
    lines = [status(comparison), summary(comparison)]
    for contrast in comparison['contrasts'].values():
        lines.append(f'  {verdict(contrast)} {evidence(contrast)} {outlook(contrast)}'.rstrip())
    return '\n'.join(lines)


def status(comparison):
    title, arms = comparison['title'], ', '.join(comparison['arms'])
    state = '' if comparison['finished'] else ' (not finished)'
    return f'{title}: {arms}{state}'


def summary(comparison):
    """One sentence for all contrasts."""
    by_word = {'better': [], 'worse': [], 'undecided': []}
    for contrast in comparison['contrasts'].values():
        by_word[contrast['verdict']].append(f'{contrast["ours"]} against {contrast["theirs"]}')
    if not by_word['better'] and not by_word['worse']:
        return 'Nothing is decided: no arm can be called better or worse than another.'
    parts = [
        f'{word.capitalize()}: {", ".join(names)}.' for word, names in by_word.items() if names
    ]
    return ' '.join(parts)


def verdict(contrast):
    """The sentence that says who wins."""
    ours, theirs, mean = contrast['ours'], contrast['theirs'], contrast['mean']
    if contrast['verdict'] == 'undecided':
        return f'{ours} against {theirs}: undecided.'
    return f'{ours} is {contrast["verdict"]} than {theirs} by {abs(mean):.4f} nats.'


def evidence(contrast):
    """The numbers behind the verdict."""
    if contrast['mean'] is None:
        return ''
    text = f'Difference {signed(contrast["mean"])}'
    if contrast['low'] is not None:
        low, high = signed(contrast['low']), signed(contrast['high'])
        text += f', 95% interval (of this contrast alone) {low} to {high}'
    if contrast['p_holm'] is not None:
        text += f', p {p_text(contrast["p_holm"])} after Holm'
    return f'{text}, {seeds_text(contrast["seeds"])}.'


def outlook(contrast):
    """Why it is undecided, and what would decide it; '' where it is decided."""
    parts = []
    if contrast['reason']:
        parts.append(contrast['reason'][0].upper() + contrast['reason'][1:] + '.')
    if contrast['seeds'] == 1:
        parts.append('One seed does not tell how much the difference varies from seed to seed.')
    if contrast['smallest'] is not None:
        needed = contrast['seeds_needed']
        more = f'about {needed} seeds' if needed else 'more than 1,000 seeds'
        parts.append(
            f'These seeds would find a difference of {contrast["smallest"]:.4f} with 80% '
            f'probability; one as large as the observed one would need {more}.'
        )
    return ' '.join(parts)


def gain_and_cost(comparison, contrast):
    """What the arm costs beside what it gains; '' for contrasts that leave the baseline out."""
    ours = comparison['arms'][contrast['ours']]
    baseline = comparison['arms'][comparison['baseline']]
    if contrast['theirs'] != comparison['baseline']:
        return ''
    costs = []
    if ours['ratio'] is not None:
        low, high = ours['quartiles'] or (None, None)
        spread = f' (quartiles {low:.2f} to {high:.2f})' if low else ''
        costs.append(f'a step takes {ours["ratio"]:.2f} times as long{spread}')
    flops = ours['flops_per_step'] / baseline['flops_per_step']
    costs.append(f'{TIMES}{flops:.3f} FLOPs' if flops != 1 else 'the same FLOPs')
    tokens = ours['tokens_per_step'] / baseline['tokens_per_step']
    if tokens != 1:
        costs.append(f'{TIMES}{tokens:.3f} tokens')
    more = ours['cost']['parameters'] - baseline['cost']['parameters']
    costs.append(f'{more:+,} parameters'.replace('-', MINUS) if more else 'the same parameters')
    text = f'Cost: {", ".join(costs)}'
    steps = ours['steps'] / baseline['steps']
    trained = f'it was trained for {steps:.3f} times as many steps'
    if comparison['equal'] != 'steps':
        text += f'; at equal {comparison["equal"]}, {trained}'
    elif steps != 1:
        text += f'; {trained}'
    worth = ours.get('worth_of_cost')
    is_gain = contrast['mean'] is not None and contrast['mean'] < 0
    if worth is not None and ours['ratio'] * steps > 1 and is_gain:
        share = worth / -contrast['mean']
        text += (
            f'; that time would gain {comparison["baseline"]} about {worth:.4f} nats, '
            f'{share:.0%} of the gain'
        )
    return text + '.'


def cautions(comparison):
    """What a reader must know before believing the verdicts."""
    notes = []
    if not comparison['finished']:
        notes.append(
            'Not finished: a contrast gets no verdict before every planned seed of both its arms '
            'has finished.'
        )
    if not comparison['plan']:
        notes.append(
            'These runs were not planned as a comparison: their learning rates were not tuned '
            'here, and nobody wrote down beforehand how many of them would be trained.'
        )
    elif not comparison['tuning']:
        notes.append(
            'Untuned: every arm has the learning rate that it was given. An arm may win because '
            'that rate suits it; --rates tries several for each.'
        )
    for arm, sweep in comparison['tuning'].items():
        if sweep['edge']:
            notes.append(
                f'The best learning rate of {arm}, {sweep["best"]:g}, is at the edge of those '
                'tried, extended once: a better one may lie beyond.'
            )
    if comparison['plan']:
        notes += plan_notes(comparison['plan'])
    for name, arm in comparison['arms'].items():
        for path, wiring in arm['from_files'].items():
            taken = ', '.join(f'{key}={value}' for key, value in wiring.items()) or 'nothing'
            notes.append(
                f'{name} takes the wiring of {path} ({taken}); its size, schedule and data are '
                'those of the baseline.'
            )
    values = comparison['provenance']
    for fact in ('device', 'dtype', 'threads', 'commit', 'torch'):
        if len(values.get(fact, [])) > 1:
            listed = ', '.join(short(value) for value in values[fact])
            notes.append(f'The runs differ in {fact}: {listed}.')
    return notes


def plan_notes(plan):
    notes = []
    before = plan['results_before']
    if any(before.values()):
        notes.append(
            f'When the plan was written, {before["tuning"]} tuning runs and {before["test"]} test '
            'runs had finished already.'
        )
    for entry in plan['code_changes']:
        notes.append(
            f'The code was changed at {entry["date"]}, after {entry["results"]["test"]} test runs and '
            f'{entry["results"]["tuning"]} tuning runs: {entry["what"]}.'
        )
    for entry in plan['history']:
        results = entry['results']
        changes = '; '.join(f'{k}: {a} became {b}' for k, (a, b) in entry['changes'].items())
        notes.append(
            f'The plan {entry["hash"]} of {entry["date"]} was changed at {entry["until"]}, after '
            f'{results["test"]} test runs and {results["tuning"]} tuning runs: {changes}. Its '
            'p values assume that nobody looked at those results.'
        )
    return notes


# --- tables: (title, head, rows), cells are text --------------------------------------------------


def contrast_table(comparison):
    seeds = sorted({s for c in comparison['contrasts'].values() for s in c['differences']})
    head = ['contrast', 'verdict', 'difference', '95% interval, alone', 'p', 'p, Holm']
    head += [f'seed {seed}' for seed in seeds]
    rows = []
    for c in comparison['contrasts'].values():
        interval = '' if c['low'] is None else f'{signed(c["low"])} to {signed(c["high"])}'
        row = [f'{c["ours"]} {MINUS} {c["theirs"]}', c['verdict'], signed(c['mean']), interval]
        row += [p_text(c['p']), p_text(c['p_holm'])]
        rows.append(row + [signed(c['differences'].get(seed)) for seed in seeds])
    return 'Contrasts', head, rows


def arm_table(comparison):
    head = [
        'arm',
        'settings',
        'learning rate',
        'steps',
        'seeds',
        'validation loss',
        'sd over seeds',
    ]
    rows = []
    for name, arm in comparison['arms'].items():
        rate = 'not known' if arm['rate'] is None else f'{arm["rate"]:g}'
        row = [name, arm['words'], rate, f'{arm["steps"]:,}', str(len(arm['losses']))]
        rows.append(row + [plain(arm['mean']), plain(arm['sd'])])
    return 'Arms', head, rows


def cost_table(comparison):
    base = comparison['arms'][comparison['baseline']]
    head = [
        'arm',
        'parameters',
        'FLOPs/token',
        'FLOPs/step',
        'KV cache bytes/token',
        'ms/step',
        'time',
        'peak GiB',
    ]
    rows = []
    for name, arm in comparison['arms'].items():
        cost = arm['cost']
        share = arm['flops_per_step'] / base['flops_per_step']
        row = [
            name,
            f'{cost["parameters"]:,}',
            f'{cost["flops_per_token"]:.4g}',
            f'{arm["flops_per_step"]:.4g} ({TIMES}{share:.3f})',
        ]
        row += [
            f'{cost["cache_bytes_per_token"]:,.0f}',
            plain(arm['ms'], 1),
            ratio_text(arm['ratio']),
        ]
        peak = arm['peak_bytes']
        rows.append(row + ['' if peak is None else f'{peak / 2**30:.2f}'])
    keep = [i for i in range(len(head)) if any(row[i] for row in rows)]
    rows = [[row[i] for i in keep] for row in rows]
    return 'Cost', [head[i] for i in keep], rows


def tuning_table(comparison):
    rates = sorted({rate for t in comparison['tuning'].values() for rate in t['trials']})
    head = ['arm', *(f'{rate:g}' for rate in rates)]
    rows = []
    for arm, sweep in comparison['tuning'].items():
        row = [arm]
        for rate in rates:
            trial = sweep['trials'].get(rate)
            text = ''
            if trial and not trial['complete']:
                text = f'{len(trial["losses"])} finished'
            elif trial:
                text = plain(trial['mean']) if math.isfinite(trial['mean']) else 'diverged'
            row.append(f'**{text}**' if rate == sweep['best'] else text)
        rows.append(row)
    return 'Validation loss by learning rate, mean of the tuning seeds (bold: chosen)', head, rows


def domain_table(comparison):
    names = list(next(iter(comparison['domains'].values()), {}))
    head = ['contrast', *names]
    rows = []
    for key, by_domain in comparison['domains'].items():
        c = comparison['contrasts'][key]
        row = [f'{c["ours"]} {MINUS} {c["theirs"]}']
        for name in names:
            d = by_domain[name]
            half = '' if d['low'] is None else f' ± {half_width(d):.4f}'
            row.append(f'{signed(d["mean"])}{half}')
        rows.append(row)
    return 'Difference per domain, ± half of its 95% interval (not corrected)', head, rows


def curve_table(comparison):
    """The mean curve at six points of training."""
    curves = comparison['curves']
    end = max((curve['steps'][-1] for curve in curves.values()), default=0)
    marks = [round(end * share) for share in (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)]
    rows = []
    for name, curve in curves.items():
        row = [f'{name} {MINUS} {comparison["baseline"]}']
        for mark in marks:
            earlier = [i for i, step in enumerate(curve['steps']) if step <= mark]
            is_inside = earlier and mark <= curve['steps'][-1]
            row.append(signed(curve['mean'][earlier[-1]]) if is_inside else '')
        rows.append(row)
    head = ['training loss', *(f'step {mark:,}' for mark in marks)]
    return 'Training loss relative to the baseline, smoothed, mean over seeds', head, rows


def trouble_table(comparison):
    head = ['arm', 'skipped steps', 'loss spikes']
    rows = []
    for name, arm in comparison['arms'].items():
        rows.append([name, str(arm['skipped']), str(arm['spikes'])])
    if all(row[1:] == ['0', '0'] for row in rows):
        rows = []  # said in facts()
    return 'Skipped steps (no finite gradient) and loss spikes, over all test runs', head, rows


def settings_table(comparison):
    arms = list(comparison['arms'])
    rows = []
    for name, values in comparison['settings'].items():
        rows.append([name, *(short(values[arm]) for arm in arms)])
    return 'Settings that differ', ['setting', *arms], rows


def facts(comparison):
    """[(name, text)]: how it was made."""
    lines = [('metric', f'validation loss at the end of training, {comparison["evaluation"]}')]
    plan = comparison['plan']
    arms = comparison['arms'].values()
    has_finished = any(arm['losses'] for arm in arms)
    if has_finished and not any(arm['skipped'] or arm['spikes'] for arm in arms):
        text = 'no step was skipped for a gradient that is not finite, and no loss spiked'
        lines.append(('steps', text))
    if plan:
        seeds = ', '.join(map(str, plan['plan']['seeds']))
        lines.append(('test seeds', seeds))
        if plan['plan']['rates']:
            lines.append(('tuning seeds', ', '.join(map(str, plan['plan']['tuning_seeds']))))
        lines.append(('rule', plan['plan']['rule']))
        lines.append(('plan', f'{plan["hash"]}, written {plan["date"]}, in plan.json'))
        length = len(plan['diff'].splitlines())
        work_tree = f'with a diff of {length:,} lines, in plan.json' if length else 'unchanged'
        lines.append(('code', f'commit {plan["commit"][:12]}, {work_tree}'))
        lines.append(('versions', ', '.join(f'{k} {v}' for k, v in plan['versions'].items())))
    for name, values in comparison['provenance'].items():
        if name != 'load':
            lines.append((name, ', '.join(short(value) for value in values)))
    return lines


def times(comparison):
    """[(name, text)]: the facts that would change if the same runs were trained again."""
    lines = [('training took', f'{duration(comparison["seconds"])}, all runs together')]
    load = comparison['provenance'].get('load')
    if load:
        lines.append(('load of the machine', f'{min(load)} to {max(load)}'))
    if comparison['timing']:
        lines.append(('step times', comparison['timing']['how']))
        for arm, problem in comparison['timing'].get('problems', {}).items():
            lines.append((f'step time of {arm}', problem))
    return lines


def tables(comparison):
    """The tables that have something to show."""
    every = [contrast_table(comparison), arm_table(comparison), cost_table(comparison)]
    if comparison['tuning']:
        every.append(tuning_table(comparison))
    if comparison['curves']:
        every.append(curve_table(comparison))
    every += [domain_table(comparison), settings_table(comparison), trouble_table(comparison)]
    return [(title, head, rows) for title, head, rows in every if rows and len(head) > 1]


# --- report.md ------------------------------------------------------------------------------------


def markdown(comparison):
    lines = [f'# {status(comparison)}', '', subtitle(comparison), '', summary(comparison), '']
    for contrast in comparison['contrasts'].values():
        text = f'- **{verdict(contrast)}** {evidence(contrast)} {outlook(contrast)}'
        lines.append(text.rstrip())
        cost = gain_and_cost(comparison, contrast)
        lines += [f'  {cost}'] if cost else []
    for title, notes in (
        ('Before you believe it', cautions(comparison)),
        ('Problems', problem_lines(comparison)),
    ):
        if notes:
            lines += ['', f'## {title}', '', *(f'- {note}' for note in notes)]
    for title, head, rows in tables(comparison):
        lines += ['', f'## {title}', '', markdown_table(head, rows)]
    lines += ['', '## How it was made', '']
    lines += [f'- {name}: {text}' for name, text in facts(comparison)]
    lines += ['', '## Time', '']
    lines += [f'- {name}: {text}' for name, text in times(comparison)]
    return '\n'.join(lines) + '\n'


def problem_lines(comparison):
    return [f'{name}: {problem}' for name, problem in comparison['problems'].items()]


# --- report.html ----------------------------------------------------------------------------------

THEME = """
:root { color-scheme: light dark; --ink: #1c1f23; --soft: #5b6470; --faint: #d9dde2; --paper: #fff;
  --card: #f5f6f8; --better: #1a7f37; --worse: #b3261e; --undecided: #6b7280;
  --c0: #1c1f23; --c1: #d55e00; --c2: #0072b2; --c3: #009e73; --c4: #b5508f; --c5: #3d9bd1;
  --c6: #c78a00; --c7: #7a5cc9; --c8: #888; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa4b1; --faint: #3a4049;
  --paper: #14171b; --card: #1e2329; --better: #4cc36b; --worse: #ff7b72; --undecided: #9aa4b1;
  --c0: #e6e8eb; --c1: #ff8c42; --c2: #5aa9e6; --c3: #2ec4a0; --c4: #e58fc3; --c5: #8fd0f5;
  --c6: #f0b849; --c7: #b39ddb; --c8: #aaa; } }
"""
STYLE = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 20px 16px 60px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { font-size: 1.45rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 32px 0 8px; }
p.sub { margin: 0 0 10px; color: var(--soft); }
p.summary { margin: 0 0 14px; font-size: 1.1rem; font-weight: 600; }
.verdicts { display: grid; gap: 12px 28px; align-items: start; }
@media (min-width: 900px) { .verdicts { grid-template-columns: 5fr 6fr; }
  .forest { position: sticky; top: 12px; } }
.forest svg { width: 100%; height: auto; max-width: 620px; }
.verdict { background: var(--card); border-left: 5px solid var(--undecided); border-radius: 4px;
  padding: 10px 14px; margin: 0 0 10px; }
.verdict b { display: block; font-size: 1.05rem; }
.verdict p { margin: 2px 0 0; font-size: .93rem; }
.verdict p + p { color: var(--soft); }
.better { border-color: var(--better); } .better b { color: var(--better); }
.worse { border-color: var(--worse); } .worse b { color: var(--worse); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr));
  gap: 18px 28px; align-items: start; margin-top: 16px; }
.plots svg { width: 100%; height: auto; max-width: 620px; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px 4px 0; text-align: right; border-bottom: 1px solid var(--faint);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--soft); font-weight: 600; }
th.wide, td.wide { white-space: normal; text-align: left; min-width: 160px; overflow-wrap: anywhere; }
ul { padding-left: 20px; margin: 6px 0; } li { margin: 3px 0; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; font-size: .9rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
pre { overflow-x: auto; background: var(--card); padding: 12px; font-size: .8rem; line-height: 1.4; }
.note { background: var(--card); border-radius: 4px; padding: 6px 14px; font-size: .92rem; }
@media (max-width: 520px) { dl { grid-template-columns: 1fr; } dd { margin-bottom: 6px; } }
"""
DIFF_LINES = 400  # of the work tree's diff in the page; plan.json has all of it


def forest_svg(comparison):
    """The forest plot as a file of its own, for a README; '' where no contrast has a seed."""
    plot = charts.forest(comparison['contrasts'], list(comparison['arms']))
    return standalone(plot) if plot else ''


def standalone(plot):
    """An <svg> of charts.py as a file of its own: it follows the reader's light or dark."""
    style = f'<style>{THEME}svg {{ background: var(--paper); font-family: sans-serif; }}</style>'
    return plot.replace('>', f'>{style}', 1)


def html(comparison):
    text = escaping.escape
    refresh = '' if comparison['finished'] else '<meta http-equiv="refresh" content="20">'
    parts = [
        '<!doctype html>',
        f'<html lang="en"><head><meta charset="utf-8">{refresh}',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<title>{text(status(comparison))}</title><style>{THEME}{STYLE}</style></head><body>',
        f'<h1>{text(comparison["title"])}</h1>',
        f'<p class="sub">{text(subtitle(comparison))}</p>',
        f'<p class="summary">{text(summary(comparison))}</p>',
    ]
    forest = charts.forest(comparison['contrasts'], list(comparison['arms']))
    cards = [card(comparison, contrast) for contrast in comparison['contrasts'].values()]
    parts.append(f'<div class="verdicts"><div class="forest">{forest}</div>')
    parts.append(f'<div class="cards">{"".join(cards)}</div></div>')
    parts += html_list('Before you believe it', cautions(comparison))
    parts += html_list('Problems', problem_lines(comparison))
    parts.append(f'<div class="plots">{"".join(plots(comparison))}</div>')
    for table in tables(comparison):
        parts.append(html_table(*table))
    for title, pairs in (('How it was made', facts(comparison)), ('Time', times(comparison))):
        items = [f'<dt>{text(name)}</dt><dd>{text(value)}</dd>' for name, value in pairs]
        parts.append(f'<h2>{title}</h2><dl>{"".join(items)}</dl>')
    parts.append(html_diff(comparison))
    return '\n'.join(part for part in parts if part) + '\n</body></html>\n'


def subtitle(comparison):
    state = 'Finished' if comparison['finished'] else 'Not finished'
    arms = comparison['arms'].values()
    seeds = seeds_text(max(len(arm['losses']) for arm in arms))
    if comparison['plan']:
        seeds = seeds_text(len(comparison['plan']['plan']['seeds']))
    steps = sorted({arm['steps'] for arm in arms})
    rates = 'learning rates not tuned'
    if comparison['tuning']:
        rates = 'learning rate tuned for each arm'
    lengths = f'{steps[0]:,}'
    if len(steps) > 1:
        lengths += f' to {steps[-1]:,}'
    names = f'{", ".join(comparison["arms"])} (the first is the baseline)'
    where = comparison['evaluation']
    return f'{state}: {names}. {seeds}, {lengths} steps, {rates}. Validation loss {where}.'


def card(comparison, contrast):
    text = escaping.escape
    extra = gain_and_cost(comparison, contrast)
    lines = [evidence(contrast), outlook(contrast), extra]
    body = ''.join(f'<p>{text(line)}</p>' for line in lines if line)
    word = contrast['verdict']
    return f'<div class="verdict {word}"><b>{text(verdict(contrast))}</b>{body}</div>'


def html_list(title, lines):
    if not lines:
        return []
    items = ''.join(f'<li>{escaping.escape(line)}</li>' for line in lines)
    return [f'<h2>{title}</h2><div class="note"><ul>{items}</ul></div>']


def html_table(title, head, rows):
    def cell(tag, value, name):
        kind = ' class="wide"' if name == 'settings' else ''
        content = escaping.escape(value)
        if value.startswith('**'):
            content = f'<b>{escaping.escape(value.strip("*"))}</b>'
        return f'<{tag}{kind}>{content}</{tag}>'

    lines = [''.join(cell('th', name, name) for name in head)]
    for row in rows:
        lines.append(''.join(cell('td', v, name) for v, name in zip(row, head, strict=True)))
    body = ''.join(f'<tr>{line}</tr>' for line in lines)
    return f'<h2>{escaping.escape(title)}</h2><div class="scroll"><table>{body}</table></div>'


def html_diff(comparison):
    diff = comparison['plan']['diff'] if comparison['plan'] else ''
    if not diff:
        return ''
    lines = diff.splitlines()
    more = (
        f'\n... {len(lines) - DIFF_LINES} more lines, in plan.json'
        if len(lines) > DIFF_LINES
        else ''
    )
    shown = escaping.escape('\n'.join(lines[:DIFF_LINES]) + more)
    return f'<details><summary>diff of the work tree, {len(lines)} lines</summary><pre>{shown}</pre></details>'


def plots(comparison):
    """The SVGs that have something to show."""
    arms = list(comparison['arms'])
    table = comparison['arms']
    seconds = {name: (arm['ms'] or 0) / 1e3 for name, arm in table.items()}
    flops = {name: arm['flops_per_step'] for name, arm in table.items()}
    drawings = [
        charts.relative_curves(comparison['curves'], arms),
        charts.equal_cost_curves(comparison['curves'], arms, 'time', seconds),
        charts.equal_cost_curves(comparison['curves'], arms, 'flops', flops),
        charts.rate_sweep(comparison['tuning'], arms),
        charts.domain_differences(comparison['domains'], comparison['contrasts'], arms),
        charts.gradient_norms(comparison['norms'], arms),
    ]
    return [f'<div>{drawing}</div>' for drawing in drawings if drawing]
