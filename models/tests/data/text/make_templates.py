"""Writes templates.json: templates rendered by Jinja2 in the environment of Hugging Face's apply_chat_template.

Needs Jinja2 (made with 3.1.6). The templates are written for this purpose, in the idioms that published ones use.
"""

import datetime
import json
import pathlib

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime.datetime(2024, 7, 26, 14, 5, 9)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def render(template, messages, add_generation_prompt=True, tools=None, documents=None, **kwargs):
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda f: NOW.strftime(f)
    return env.from_string(template).render(
        messages=messages, tools=tools, documents=documents, add_generation_prompt=add_generation_prompt,
        bos_token="<s>", eos_token="</s>", **kwargs)


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Hé \"there\"\n<b> & 'co' "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
    {"role": "user", "content": "And?"},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "It's <b>&\"hot\"", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "enum": ["Zürich", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city"]}, "strict": True, "ratio": 0.5, "none": None}}]
CALLS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}}}]},
    {"role": "tool", "content": "{\"t\": 30}", "name": "weather"},
    {"role": "tool", "content": "late", "name": "clock"},
]

THINKER = """
{%- if tools %}
    {{- '[system]\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '[system]\\n' + messages[0].content + '\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '[' + message.role + ']\\n' + content + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '[assistant]\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '[assistant]\\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '[user]' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant]\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

DATED = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "[h]system[/h]\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{ eos_token }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '[h]' + message['role'] + '[/h]\\n\\n'+ message['content'] | trim + eos_token }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("only single calls") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {%- for arg_name, arg_val in tool_call.arguments | items %}
            {{- arg_name + '="' ~ arg_val ~ '"' }}{%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
    {%- elif message.role == "tool" %}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
    {%- endif %}
{%- endfor %}
"""

ALTERNATING = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant, not ' + message['role']) }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}
    {# a comment
       of two lines #}
    {{ message['content'] + eos_token }}
{% endif %}
  {% if loop.last -%}   end {%- endif %}
{% endfor %}
"""

MACROS = """{% macro type_of(p, depth=0) -%}
{%- if p.type == 'object' -%}
{ {%- for k, v in p.properties.items() %}{{ k }}: {{ type_of(v, depth + 1) }}{{ ", " if not loop.last }}{% endfor -%} }@{{ depth }}
{%- elif p.enum is defined -%}"{{ p.enum | join('" | "') }}"
{%- else -%}{{ p.type }}{%- endif -%}
{%- endmacro %}
{% macro wrap(tag) %}<{{ tag }}>{{ caller() }}</{{ tag }}>{% endmacro %}
{% set block %}
  kept {{ 1 + 1 }}
{% endset %}
{% for t in tools %}{{ t.function.name }}{{ type_of(t.function.parameters) }}
{% endfor %}
{% call wrap('b') %}inside{% endcall %}

{% filter upper %}shout {{ messages[0].role }}{% endfilter %}
|{{ block }}|{{ block|length }}
{% with a = 1, b = 'x' %}{{ a }}{{ b }}{% endwith %}
"""

VALUES = """{{ none }}|{{ true }}|{{ 1.0 }}|{{ 1e20 }}|{{ 7 // 2 }}|{{ 7 / 2 }}|{{ 2 ** 10 }}|{{ -7 % 3 }}|{{ 1 + 2.5 }}|{{ 3 * 4 }}
{{ [1, 'a', none, true, 2.5, {'k': "v'"}] }}|{{ {'a': [1, 2]} }}
{{ 'x' ~ none ~ 1 ~ true ~ 1.5 ~ [1] }}|{{ 'ab' * 3 }}|{{ [1, 2] + [3] }}|{{ [0] * 3 }}
{{ undefined_thing }}|{{ undefined_thing | default('d') }}|{{ '' | default('e', true) }}|{{ none | default('n') }}
{{ messages | map(attribute='role') | join(', ') }}|{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ messages | rejectattr('role', 'equalto', 'user') | map(attribute='role') | list }}
{{ (messages | first).role }}|{{ (messages | last)['content'] }}|{{ messages[-1].role }}|{{ messages[0].content[:5] }}|{{ messages[0].content[-2] }}
{{ 'a,b,,c'.split(',') }}|{{ ' a b '.split() }}|{{ 'a-b-c'.split('-', 1) }}|{{ 'abc'.upper() }}|{{ 'x'.join(['1', '2']) }}|{{ 'hello world'.title() }}
{{ 'abcabc'.replace('b', 'X') }}|{{ 'abcabc'.replace('b', 'X', 1) }}|{{ 'abc' | replace('c', 'd') }}|{{ 'abc'.find('c') }}|{{ 'aXbX'.count('X') }}
{{ 'Abc' | lower }}|{{ 'abc' | capitalize }}|{{ 'a b' | title }}|{{ '  t ' | trim }}|{{ 'abc' | reverse }}|{{ 'abc' | list }}|{{ 3.7 | int }}|{{ '12' | int + 1 }}|{{ 2.5 | round }}|{{ -3 | abs }}
{{ [3, 1, 2] | sort }}|{{ [3, 1, 2] | max }}|{{ [1, 2, 3] | sum }}|{{ [1, 1, 2] | unique | list }}|{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}|{{ {'b': 1} | items | list | length }}
{{ 1 if false }}|{{ 'y' if 1 < 2 < 3 else 'n' }}|{{ 'a' in 'abc' }}|{{ 'role' in messages[0] }}|{{ 3 not in [1, 2] }}|{{ not none }}
{{ none is none }}|{{ 1 is number }}|{{ 'a' is string }}|{{ [] is sequence }}|{{ {} is mapping }}|{{ 2 is even }}|{{ true is boolean }}|{{ 1.5 is float }}|{{ x is undefined }}|{{ 'a' is in ['a'] }}
{% for x in [] %}a{% else %}empty{% endfor %}|{% for x in range(6) if x % 2 %}{{ x }}{% if not loop.last %},{% endif %}{% endfor %}|{% for x in range(9) %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 5 %}{% break %}{% endif %}{{ x }}{% endfor %}
{% for a, b in [(1, 2), (3, 4)] %}{{ loop.index }}{{ a }}{{ b }}{{ loop.cycle('o', 'e') }}{{ loop.revindex }}{% endfor %}|{% for c in 'abc' %}{{ loop.previtem }}{{ c }}{{ loop.nextitem }};{% endfor %}
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set ns = namespace(n=0, l=[]) %}{% for i in range(4) %}{% set ns.n = ns.n + i %}{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.n }}{{ ns.l }}
{{ '%s-%05.1f' | format('a', 2.25) }}|{{ 'a\\nb' | indent(2) }}|{{ 'a\\nb' | indent(2, true) }}|{{ "q'\\"\\\\" | tojson }}|{{ messages[0] | string }}|{{ dict(a=1, b='x') | tojson }}
{{ {'z': 1, 'a': [1.5, none]} | tojson(sort_keys=true) }}|{{ {'z': [1, {}]} | tojson(indent=2) }}|{{ [1, 2] | tojson(separators=(',', ':')) }}|{{ 'é<>&' | tojson(ensure_ascii=true) }}|{{ "<a & 'b'>" }}|{{ "<a>" | safe }}
{{ 'abc'.startswith('ab') }}|{{ 'abc'.endswith(('x', 'c')) }}|{{ 'a\\n'.rstrip() }}|{{ 'xxaxx'.strip('x') }}|{{ messages[0].get('none', 'dflt') }}|{{ messages[0].keys() | list }}|{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}|{{ 'abc'.removeprefix('a') }}|{{ '12'.isdigit() }}
"""

cases = []


def case(name, template, messages=CHAT, **rest):
    found = {"name": name, "template": template, "messages": messages, **rest}
    try:
        found["rendered"] = render(template, messages, **rest)
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise SystemExit(f"{name}: {error}")
    except jinja2.exceptions.TemplateError as error:
        found["error"] = str(error)
    cases.append(found)


case("thinker", THINKER)
case("thinker, answer last", THINKER, messages=CHAT[:3], add_generation_prompt=False)
case("thinker, thinking off", THINKER, enable_thinking=False)
case("thinker, thinking on", THINKER, enable_thinking=True)
case("thinker, tools", THINKER, messages=CALLS, tools=TOOLS)
case("thinker, reasoning given", THINKER, messages=CHAT[:2] + [
    {"role": "assistant", "content": "Yes.", "reasoning_content": "\nhm\n"}])
case("dated", DATED)
case("dated, tools", DATED, messages=CALLS, tools=TOOLS)
case("dated, given", DATED, messages=CHAT[1:], date_string="1 Jan")
case("alternating", ALTERNATING, messages=CHAT[1:])
case("alternating, refused", ALTERNATING)
case("macros", MACROS, tools=TOOLS)
for number, line in enumerate(VALUES.splitlines()):
    case(f"values {number + 1}", line)
case("white space", "a\n  {% if true %}  \n b \n  {%- endif %}\n{#- c -#}\n  d\n{%+ if true %}e{% endif %}\n\n{{ 'f' }}\n\ng\n\n")
case("trailing line break", "x\n")
case("documents", "{% for d in documents %}{{ d.title }}: {{ d['text'] }}\n{% endfor %}{{ documents|length }}",
     documents=[{"title": "T", "text": "<x>"}, {"title": "U", "text": "y"}])
case("undefined attribute", "{{ messages[0].nope }}|{{ messages[0]['nope'] }}|{{ messages[9] }}|")
case("attribute of undefined", "{{ nope.deeper }}")
case("item of undefined", "{{ messages[9].role }}")
case("text and undefined", "{{ 'a' + nope }}")
case("recursive loop", "{% for t in tools recursive %}{{ t.n }}{% if t.c %}({{ loop(t.c) }}){% endif %}{% endfor %}",
     tools=[{"n": 1, "c": [{"n": 2, "c": [{"n": 3}]}, {"n": 4}]}])

path = pathlib.Path(__file__).with_name("templates.json")
path.write_text(json.dumps(cases, ensure_ascii=False, indent=1) + "\n")
