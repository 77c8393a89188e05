//! Chat templates against Jinja2, and hostile ones.

use npuhal_models::template::TemplateSource;
use npuhal_models::vocabulary::Vocabulary;
use npuhal_models::{ChatInput, ChatMessage, ChatTemplate, TextError};
use proptest::prelude::*;
use serde_json::Value;
use std::time::{Duration, Instant, UNIX_EPOCH};

fn template(text: &str) -> Result<ChatTemplate, TextError> {
    ChatTemplate::new(text, TemplateSource::Model, "<s>", "</s>")
}

fn input(case: &Value) -> ChatInput {
    let mut input: ChatInput = serde_json::from_value(case.clone()).unwrap();
    // 2024-07-26 14:05:09
    input.now = Some(UNIX_EPOCH + Duration::from_secs(1_722_002_709));
    let known = ["name", "template", "messages", "rendered", "error", "add_generation_prompt", "tools", "documents"];
    let others = case.as_object().unwrap().iter().filter(|(key, _)| !known.contains(&key.as_str()));
    input.kwargs = others.map(|(key, value)| (key.clone(), value.clone())).collect();
    input
}

#[test]
fn renders_what_jinja2_renders() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("data/text/templates.json")).unwrap();
    let mut wrong = Vec::new();
    for case in &cases {
        let found = template(case["template"].as_str().unwrap()).and_then(|t| t.render(&input(case)));
        match (&found, case["rendered"].as_str(), case["error"].as_str()) {
            (Ok(text), Some(wanted), None) if text == wanted => {}
            (Err(TextError::TemplateRaised { message }), None, Some(wanted)) if message == wanted => {}
            // The engines word their own errors differently.
            (Err(TextError::TemplateFailed { .. }), None, Some(wanted))
                if wanted.contains("no element") || wanted.contains("undefined") => {}
            (_, wanted, error) => {
                wrong.push(format!("{}:\n  found  {found:?}\n  wanted {wanted:?} {error:?}", case["name"]))
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {}\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

/// Published renderings of Qwen3's own template: tools, earlier thoughts, thinking switched off.
#[test]
fn published_cases_of_qwen3() {
    let template =
        ChatTemplate::new(include_str!("data/text/qwen3_chat_template.jinja"), TemplateSource::Model, "", "<|im_end|>")
            .unwrap();
    let lines: Vec<&str> = include_str!("data/text/qwen3_template_cases.jsonl").lines().collect();
    assert_eq!(lines.len(), 12);
    for line in lines {
        let case: Value = serde_json::from_str(line).unwrap();
        let mut input: ChatInput = serde_json::from_value(case.clone()).unwrap();
        input.kwargs = case["kwargs"].as_object().unwrap().clone();
        assert_eq!(template.render(&input).unwrap(), case["expected"].as_str().unwrap(), "{line}");
    }
}

#[test]
fn conversations_with_tools_have_a_template_of_their_own() {
    let mut vocabulary = Vocabulary {
        tokens: ["<s>", "</s>", "<|end|>"].map(str::to_owned).into(),
        chat_template: Some("chat {{ eos_token }}".into()),
        named_templates: [("tool_use".to_owned(), "tools {{ tools | length }}".to_owned())].into(),
        eos: vec![1, 2],
        eos_token: Some(2),
        ..Vocabulary::default()
    };
    let template = ChatTemplate::from_vocabulary(&vocabulary).unwrap();
    let mut input = ChatInput::new(vec![ChatMessage::new("user", "hi")]);
    assert_eq!(template.render(&input).unwrap(), "chat <|end|>");
    input.tools = Some(serde_json::json!([]));
    assert_eq!(template.render(&input).unwrap(), "chat <|end|>");
    input.tools = Some(serde_json::json!([{"type": "function"}]));
    assert_eq!(template.render(&input).unwrap(), "tools 1");
    vocabulary.eos_token = None;
    input.tools = None;
    assert_eq!(ChatTemplate::from_vocabulary(&vocabulary).unwrap().render(&input).unwrap(), "chat </s>");
    vocabulary.named_templates.insert("tool_use".into(), "{% if %}".into());
    assert!(ChatTemplate::from_vocabulary(&vocabulary).is_err());
}

/// Renders `text`, which must fail soon.
fn refused(text: &str) -> TextError {
    let start = Instant::now();
    let input = ChatInput::new(vec![ChatMessage::new("user", "hello")]);
    let error = template(text).and_then(|t| t.render(&input)).map(|text| text.len());
    let error = error.expect_err(&text[..text.len().min(200)]);
    assert!(start.elapsed() < Duration::from_secs(6), "{:?}: {}", start.elapsed(), &text[..text.len().min(200)]);
    error
}

#[test]
fn endless_and_exploding_templates_are_stopped() {
    let loops = [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% for a in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
        "{% set n = namespace(s='xy') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='xy') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='xy') %}{% for i in range(99) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
        "{% set n = namespace(s='xy') %}{% for i in range(99) %}{% set n.s = n.s.replace('x', n.s) %}{% endfor %}",
        "{% set n = namespace(s='xy') %}{% for i in range(99) %}{% set n.s = [n.s, n.s] | join(n.s) %}{% endfor %}",
        "{% set n = namespace(s='xy') %}{% for i in range(99) %}{% set n.s = n.s.join([n.s, n.s]) %}{% endfor %}",
        "{% set n = namespace(s='xy') %}{% for i in range(99) %}{% set n.s = '%s%s' | format(n.s, n.s) %}{% endfor %}",
        "{% set n = namespace(s='xy') %}{% for i in range(99) %}{% set n.s = '{0}{0}'.format(n.s) %}{% endfor %}",
        "{% set n = namespace(s='\\n') %}{% for i in range(99) %}{% set n.s = n.s | indent(900, true, true) %}{% endfor %}",
        "{% set n = namespace(l=[1]) %}{% for i in range(99) %}{% set n.l = n.l + n.l %}{% endfor %}",
        "{% set n = namespace(l=[1]) %}{% for i in range(99) %}{% set n.l = [n.l, n.l] %}{% endfor %}",
        "{% set n = namespace(l=[1]) %}{% for i in range(99) %}{% set n.l = {'a': n.l, 'b': n.l} %}{% endfor %}{{ n.l }}",
        "{% set n = namespace(l=[1]) %}{% for i in range(99999) %}{% set n.l = [n.l] %}{% endfor %}",
        "{% set n = namespace(l=1) %}{% for i in range(99999) %}{% set n.l = namespace(l=n.l) %}{% endfor %}",
        "{% set n = namespace() %}{% set n.n = n %}{{ n }}",
        "{% set n = namespace(t=none) %}{% for i in range(99999) %}{% set m = namespace() %}{% set n.t = m %}{% endfor %}",
        "{% set n = namespace(f=none) %}{% for i in range(99999) %}{% set p = n.f %}{% macro f() %}{{ p }}{% endmacro %}{% set n.f = f %}{% endfor %}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ 10 ** 12 * 'x' }}",
        "{{ [1] * 10 ** 12 }}",
        "{{ ([1] * 10 ** 12) | list | length }}",
        "{{ ([1, 2] * 9223372036854775807) | length }}",
        "{{ range(10 ** 12) }}",
        "{{ range(99999) | map('string') | map('indent', 10 ** 9) | list }}",
        "{{ 'x' | indent(10 ** 12) }}",
        "{{ [1] | tojson(indent=10 ** 12) }}",
        "{{ '%99999999999d' | format(1) }}",
        "{{ '%.99999999d' | format(1) }}",
        "{{ '{:>9999999999}'.format('a') }}",
        "{{ 'abc'.split('') }}",
        "{{ 10 ** 99 }}",
        "{{ 9223372036854775807 * 9223372036854775807 * 9223372036854775807 }}",
        "{% for i in range(99999) %}{% for m in messages %}{% set x = ('y' * 100000) == ('z' * 100000) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(s='ab' * 500000) %}{% for i in range(99999) %}{% if n.s == n.s ~ '' %}{% endif %}{% endfor %}",
        "{% set n = namespace(s='ab' * 500000, t='ab' * 500000) %}{% for i in range(99999) %}{% if n.s == n.t %}{% endif %}{% endfor %}",
        "{% set n = namespace(s='ab' * 500000, t='ab' * 500000) %}{% for i in range(99999) %}{% if n.s is eq(n.t) %}{% endif %}{% endfor %}",
        "{% set n = namespace(s='ab' * 500000) %}{% for i in range(99999) %}{% if 'c' in n.s %}{% endif %}{% endfor %}",
        "{% set n = namespace(s='ab' * 500000) %}{% for i in range(99999) %}{{ n.s[7:9] }}{% endfor %}",
        "{% set n = namespace(s='ab' * 500000) %}{% for i in range(99999) %}{% if n.s | length == 3 %}{% endif %}{% endfor %}",
        "{% set n = namespace(s='ab' * 500000) %}{% for i in range(99999) %}{% if n.s[999999] == 'x' %}{% endif %}{% endfor %}",
        "{% set n = namespace(s='ab' * 500000) %}{% for i in range(99999) %}{% for c in n.s %}{% break %}{% endfor %}{% endfor %}",
        "{% set n = namespace(l=range(99999)) %}{% for i in range(99999) %}{% set n.l = n.l | reverse %}{% endfor %}",
        "{% set n = namespace(l=range(99999)) %}{% for i in range(99999) %}{% if n.l | list | last == 1 %}{% endif %}{% endfor %}",
        "{% set n = namespace(l=range(99999)) %}{% for i in range(99999) %}{% if (-1) in n.l %}{% endif %}{% endfor %}",
        "{% set n = namespace(d={}) %}{% for i in range(99999) %}{% set n.d = dict(n.d, **{'k' ~ i: i}) %}{% endfor %}",
        "{{ lipsum }}{{ nope.x }}",
    ];
    for text in loops {
        let error = refused(text);
        let message = error.to_string();
        assert!(
            matches!(error, TextError::TemplateLimit { .. } | TextError::TemplateFailed { .. }),
            "{text}: {message}"
        );
    }
}

#[test]
fn deep_and_huge_sources_are_refused() {
    let sources = [
        format!("{{{{ {} }}}}", "1+".repeat(200_000) + "1"),
        format!("{{{{ {}1{} }}}}", "(".repeat(10_000), ")".repeat(10_000)),
        format!("{{{{ {}1{} }}}}", "[".repeat(400), "]".repeat(400)),
        format!("{{{{ x{} }}}}", ".a".repeat(100_000)),
        format!("{{{{ x{} }}}}", "|e".repeat(100_000)),
        format!("{{% if a %}}{}{{% endif %}}", "{% elif b %}".repeat(20_000)),
        "{% if a %}".repeat(20_000),
        "{% for a in b %}".repeat(20_000) + &"{% endfor %}".repeat(20_000),
        "x".repeat(2_000_000),
        "{% if x".to_owned(),
        "{{ 'unclosed }}".to_owned(),
    ];
    for source in sources {
        let error = refused(&source).to_string();
        assert!(error.len() < 1000, "{} bytes", error.len());
    }
    // As deep as the bounds allow, on a small stack.
    let deepest = [
        format!("{{{{ {} }}}}", "1+".repeat(280) + "1"),
        format!("{{{{ x{} }}}}", "|upper".repeat(280)),
        format!("{{{{ {} }}}}", "not ".repeat(500) + "1"),
        format!("{{% if a %}}{}{{% endif %}}", "{% elif b %}".repeat(199)),
        format!("{}x{}", "{% if 1 %}".repeat(60), "{% endif %}".repeat(60)),
    ];
    for source in deepest {
        let thread = std::thread::Builder::new().stack_size(2 << 20);
        let render = move || template(&source).and_then(|t| t.render(&ChatInput::new(Vec::new()))).map(|_| ());
        thread.spawn(render).unwrap().join().unwrap().unwrap();
    }
}

/// The bounds leave room for conversations much longer than any context window of these models.
#[test]
fn long_conversations_are_rendered() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("data/text/templates.json")).unwrap();
    let case = cases.iter().find(|case| case["name"] == "thinker").unwrap();
    let mut long = input(case);
    long.messages = long.messages.iter().cycle().take(8000).cloned().collect();
    let text = template(case["template"].as_str().unwrap()).unwrap().render(&long).unwrap();
    assert_eq!(text.matches("[assistant]").count(), 2001);
    long.messages.truncate(2);
    long.messages[1].content = Some("word <b> ".repeat(200_000));
    let text = template(case["template"].as_str().unwrap()).unwrap().render(&long).unwrap();
    assert!(text.len() > 1_800_000);
}

#[test]
fn syntax_errors_tell_line_and_text() {
    let message = template("a\n{% if x %}\n{% endfor %}\n").unwrap_err().to_string();
    assert!(message.contains("line 3") && message.contains("{% endfor %}"), "{message}");
    let message = refused("a\n\n{{ messages[0].nope.deeper }}").to_string();
    assert!(message.contains("line 3") && message.contains("nope.deeper"), "{message}");
    let message = refused("{{ raise_exception('Only <users> may speak') }}").to_string();
    assert!(message.contains("Only <users> may speak"), "{message}");
}

#[test]
fn nothing_outside_can_be_reached() {
    for text in [
        "{% include 'chat_template' %}",
        "{% include '/etc/passwd' ignore missing %}",
        "{% import 'x' as y %}",
        "{% from 'x' import y %}",
        "{% extends 'x' %}",
        "{% block b %}{% endblock %}",
    ] {
        let message = template(text).unwrap_err().to_string();
        assert!(message.contains("not available"), "{message}");
    }
    assert!(matches!(refused("{{ debug() }}"), TextError::TemplateFailed { .. }));
}

#[test]
fn generation_tags_are_passed_over() {
    let text = "a{% generation %}b{% endgeneration %}\n{%- generation -%} c {%- endgeneration %}";
    assert_eq!(template(text).unwrap().render(&ChatInput::new(Vec::new())).unwrap(), "abc");
}

#[test]
fn content_is_read_from_text_null_and_parts() {
    let read = |json: &str| serde_json::from_str::<ChatInput>(json).map(|i| i.messages[0].content.clone());
    assert_eq!(read(r#"{"messages":[{"role":"user","content":"a"}]}"#).unwrap(), Some("a".to_owned()));
    assert_eq!(read(r#"{"messages":[{"role":"user","content":null}]}"#).unwrap(), None);
    assert_eq!(read(r#"{"messages":[{"role":"user"}]}"#).unwrap(), None);
    let parts = r#"{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}"#;
    assert_eq!(read(parts).unwrap(), Some("a\nb".to_owned()));
    let image = r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}"#;
    assert!(read(image).unwrap_err().to_string().contains("image_url"));
}

#[test]
fn variables_of_the_conversation_cannot_be_replaced() {
    let mut input = ChatInput::new(Vec::new());
    input.kwargs.insert("bos_token".to_owned(), "x".into());
    let message = template("{{ bos_token }}").unwrap().render(&input).unwrap_err().to_string();
    assert!(message.contains("bos_token"), "{message}");
}

#[test]
fn arguments_of_tool_calls_are_objects() {
    let case: Value = serde_json::from_str(
        r#"{"messages":[{"role":"assistant","content":null,"tool_calls":[{"function":{"name":"f","arguments":"{\"a\":1}"}},
            {"function":{"name":"g","arguments":"not json"}}]}]}"#,
    )
    .unwrap();
    let text = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }};{% endfor %}";
    assert_eq!(template(text).unwrap().render(&input(&case)).unwrap(), r#"{"a": 1};"not json";"#);
}

/// Pieces of the template language in any order, often nearly valid.
fn template_soup() -> impl Strategy<Value = String> {
    let expression = prop::sample::select(vec![
        "messages",
        "messages[0]",
        "m.content",
        "'x' * 9",
        "ns.s ~ ns.s",
        "[1, 'a', none]",
        "{'k': messages}",
        "range(3)",
        "ns",
        "loop.index",
        "f(m)",
        "f",
        "caller()",
        "m | tojson",
        "messages | map(attribute='role') | list",
        "x | upper",
        "1 // 0",
        "1 % 0",
        "-9223372036854775807 - 2",
        "2 ** 999",
        "1e308 * 10",
        "'a' * -1",
        "m.content[::-1]",
        "m.content[5:-1:0]",
        "messages[1:][0]",
        "'%s %d' | format(1, 'a')",
        "'{} {x}'.format(1)",
        "x is divisibleby 0",
        "m.items() | list | sort",
        "messages | sort(attribute='role')",
        "messages | sum",
        "'é' | indent(1)",
        "1 | round(2)",
        "namespace(a=ns)",
        "dict(messages[0], **m)",
        "m.content.split('l', 1)",
        "messages | groupby('role')",
        "not x",
        "x if m else f",
        "m.content | replace('l', m)",
        "[[1]] | first | first",
        "m['content'].count('')",
        "x in m",
        "strftime_now('%Q%-')",
        "raise_exception(1)",
        "'' | list | min",
        "'abc' | unique | join(m)",
        "1 < 'a'",
        "m < ns",
    ]);
    let piece = (0..20usize, expression).prop_map(|(shape, e)| match shape {
        0 => "{% for m in messages %}".to_owned(),
        1 => format!("{{% for m in {e} %}}"),
        2 => "{% endfor %}".to_owned(),
        3 => format!("{{% if {e} %}}"),
        4 => "{% else %}".to_owned(),
        5 => "{% endif %}".to_owned(),
        6 => "{% set ns = namespace(s='a') %}".to_owned(),
        7 => format!("{{% set ns.s = {e} %}}"),
        8 => format!("{{% set x = {e} %}}"),
        9 => format!("{{% macro f(m, x={e}) %}}"),
        10 => "{% endmacro %}".to_owned(),
        11 => format!("{{% call f({e}) %}}c{{% endcall %}}"),
        12 => format!("{{% set x %}}a{{{{ {e} }}}}{{% endset %}}"),
        13 => format!("{{% with m = {e} %}}w{{% endwith %}}"),
        14 => format!("{{% set a, (b, c) = {e} %}}"),
        15 => "{% filter upper %}u{% endfilter %}{% break %}".to_owned(),
        _ => format!("{{{{ {e} }}}} "),
    });
    prop::collection::vec(piece, 1..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn no_template_panics(soup in template_soup(), cut in 0usize..400) {
        let input = ChatInput::new(vec![ChatMessage::new("user", "hello"), ChatMessage::new("assistant", "é🚀")]);
        let cut = soup.char_indices().map(|(at, _)| at).nth(cut).unwrap_or(soup.len());
        for text in [&soup[..], &soup[..cut]] {
            if let Err(error) = template(text).and_then(|t| t.render(&input)) {
                prop_assert!(!error.to_string().contains("engine failed"), "{}", error);
            }
        }
    }
}
