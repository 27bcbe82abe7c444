"""The page at ``/docs``: the control API's OpenAPI as plain HTML.

It runs no script and loads nothing: it is whole where there is no internet, and nobody else's code
stands beside the admin key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from jinja2 import Environment
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse

_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}
_TEMPLATE: Final = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{ info.title }}: control API</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code { font-size: 0.95em }
h2 { margin-top: 3rem }
h3 { margin: 2rem 0 0; font-weight: normal }
p { margin: 0.25rem 0 }
table { border-collapse: collapse; margin: 0.5rem 0 }
td { padding: 0 1.5rem 0 0; vertical-align: top }
</style>
<h1>{{ info.title }}</h1>
<p>{{ info.description | prose }}</p>
<p>Version {{ info.version }}. For programs, and with every bound:
<a href="openapi.json">openapi.json</a>.</p>

{%- macro row(name, schema, required) %}
<tr>
  <td><code>{{ name }}</code></td>
  <td>{{ schema | kind }}</td>
  <td>{{ "required" if required else schema | default_value }}</td>
  <td>{{ schema.description | prose }}</td>
</tr>
{%- endmacro %}

<h2>Routes</h2>
{% for path, operations in paths.items() -%}
{% for method, told in operations.items() %}
<h3><b>{{ method | upper }}</b> <code>{{ path }}</code></h3>
<p>{{ told.description | prose }}</p>
{% if told.parameters -%}
<table>
{%- for parameter in told.parameters %}
{{- row(parameter.name, parameter.schema, parameter.required) }}
{%- endfor %}
</table>
{% endif -%}
{% if told.requestBody -%}
<p>Takes {{ told.requestBody | content }}.</p>
{% endif -%}
<p>Answers
{%- for status, answer in told.responses.items() %} {{ status }}
  {%- if answer.content %} {{ answer | content }}{% endif %}{{ "." if loop.last else "," }}
{%- endfor %}</p>
{% endfor -%}
{% endfor %}
<h2>Objects</h2>
{% for name, schema in components.schemas.items() %}
<h3 id="{{ name }}"><b>{{ name }}</b></h3>
<p>{{ schema.description | prose }}</p>
{% if schema.properties is defined -%}
<table>
{%- for field, of in schema.properties.items() %}
{{- row(field, of, field in (schema.required or ())) }}
{%- endfor %}
</table>
{%- else -%}
<p>{{ schema | kind }}</p>
{%- endif %}
{% endfor %}
"""


def control_page(openapi: Mapping[str, Any]) -> HTMLResponse:
    """Shows every route and object of an OpenAPI description."""
    return HTMLResponse(_PAGE.render(openapi), headers=_HEADERS)


def _kind(schema: Mapping[str, Any]) -> Markup:
    """What a JSON schema takes, in a few words."""
    if named := schema.get("$ref"):
        return Markup('<a href="#{0}">{0}</a>').format(named.rpartition("/")[2])
    if one_of := schema.get("anyOf"):
        return Markup(" or ").join(map(_kind, one_of))
    if values := schema.get("enum"):
        return Markup(" or ").join(json.dumps(value) for value in values)
    if items := schema.get("items"):
        return Markup("list of {}").format(_kind(items))
    return escape(schema.get("type", "anything"))


def _content(told: Mapping[str, Any]) -> Markup:
    """What a body or an answer holds, whatever it is encoded as."""
    return Markup(" or ").join(_kind(of.get("schema", {})) for of in told["content"].values())


def _default(schema: Mapping[str, Any]) -> str:
    given = schema.get("default")
    return "" if given is None else f"= {json.dumps(given)}"


def _prose(text: str) -> Markup:
    """A docstring's text, its literals as code."""
    parts = (text or "").split("``")
    code = Markup("<code>{}</code>")
    return Markup("").join(code.format(p) if i % 2 else p for i, p in enumerate(parts))


_ENVIRONMENT: Final = Environment(autoescape=True, trim_blocks=True)
_ENVIRONMENT.filters |= {
    "content": _content,
    "default_value": _default,
    "kind": _kind,
    "prose": _prose,
}
_PAGE: Final = _ENVIRONMENT.from_string(_TEMPLATE)
