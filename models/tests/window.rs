//! The small-context window against the published cases, on a small byte-level BPE vocabulary.

use npuhal_models::vocabulary::{TokenKind, Vocabulary};
use npuhal_models::window::{ChatMl, FirstTurn, Fitted, Overflow, Truncation, WindowError, fit, fit_text};
use npuhal_models::{ChatMessage, ControlTokens, Specials, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::LazyLock;

static GOLDEN: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_str(include_str!("data/xdna1/truncation_cases.json")).unwrap());
static TINY: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::from_vocabulary(&vocabulary()).unwrap());
static TEMPLATE: LazyLock<ChatMl> =
    LazyLock::new(|| ChatMl::new(&TINY, GOLDEN["default_system"].as_str().unwrap()).unwrap());

fn vocabulary() -> Vocabulary {
    let file: Value = serde_json::from_str(include_str!("data/text/tiny_tokenizer/tokenizer.json")).unwrap();
    let vocab = file["model"]["vocab"].as_object().unwrap();
    let mut tokens = vec![String::new(); vocab.len()];
    for (token, id) in vocab {
        tokens[id.as_u64().unwrap() as usize] = token.clone();
    }
    let mut kinds = vec![TokenKind::Normal; tokens.len()];
    for added in file["added_tokens"].as_array().unwrap() {
        kinds[added["id"].as_u64().unwrap() as usize] = TokenKind::Control;
    }
    let merges = file["model"]["merges"].as_array().unwrap().iter();
    Vocabulary {
        model: "gpt2".into(),
        pre_tokenizer: "gpt-2".into(),
        tokens,
        kinds,
        merges: merges.map(|m| format!("{} {}", m[0].as_str().unwrap(), m[1].as_str().unwrap())).collect(),
        ..Vocabulary::default()
    }
}

fn conversations() -> BTreeMap<String, Vec<ChatMessage>> {
    serde_json::from_value(GOLDEN["conversations"].clone()).unwrap()
}

#[test]
fn every_published_case_is_cut_as_published() {
    let conversations = conversations();
    let cases = GOLDEN["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 102);
    for case in cases {
        let messages = &conversations[case["conversation"].as_str().unwrap()];
        let budget = case["budget"].as_u64().unwrap() as usize;
        let whole = TEMPLATE.fit(messages, usize::MAX, Overflow::Error).unwrap();
        assert_eq!(json!(whole.ids.len()), case["full_length"], "{case}");
        let Fitted { ids, truncation } = TEMPLATE.fit(messages, budget, Overflow::Truncate).unwrap();
        assert_eq!(json!(truncation), case["truncation"], "{case}");
        assert_eq!(json!(ids), case["ids"], "{case}");
        assert_eq!(TINY.decode(&ids, ControlTokens::Show), case["text"].as_str().unwrap());
    }
}

#[test]
fn plain_texts_keep_their_end() {
    let cases = GOLDEN["raw_prompt_window"].as_array().unwrap();
    assert_eq!(cases.len(), 3);
    for case in cases {
        let ids = TINY.encode(case["prompt"].as_str().unwrap(), Specials::Plain).unwrap();
        let budget = case["budget"].as_u64().unwrap() as usize;
        let fitted = fit_text(&ids, budget, Overflow::Truncate).unwrap();
        assert_eq!(
            (json!(fitted.ids), json!(fitted.truncation.truncated_prompt)),
            (case["ids"].clone(), case["truncated"].clone())
        );
        assert_eq!(fit_text(&ids, budget, Overflow::Error).is_err(), fitted.truncation.truncated_prompt);
    }
}

#[test]
fn nothing_is_cut_where_that_was_not_allowed() {
    let conversations = conversations();
    let error = TEMPLATE.fit(&conversations["many"], 40, Overflow::Error).unwrap_err();
    assert!(matches!(error, WindowError::TooLong { budget: 40, found } if found > 40), "{error}");
    assert!(matches!(TEMPLATE.fit(&[], 40, Overflow::Truncate), Err(WindowError::NoMessages)));
    let mut plain = vocabulary();
    plain.kinds[1] = TokenKind::Normal;
    let error = ChatMl::new(&Tokenizer::from_vocabulary(&plain).unwrap(), "x").unwrap_err();
    assert!(matches!(error, WindowError::NoControlToken { token: "<|im_end|>" }), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any conversation fits any budget, loses nothing where it need not, and says what it lost.
    #[test]
    fn any_conversation_fits(
        texts in prop::collection::vec("[ a-zü🚀\n]{0,40}", 1..6),
        with_system in any::<bool>(),
        budget in 1usize..80,
    ) {
        let role = |index: usize| match index {
            0 if with_system => "system",
            index if index % 2 == 1 => "user",
            _ => "assistant",
        };
        let messages: Vec<ChatMessage> =
            texts.iter().enumerate().map(|(index, text)| ChatMessage::new(role(index), text.as_str())).collect();
        let whole = TEMPLATE.render(&messages).unwrap();
        let fitted = fit(&messages, budget, Overflow::Truncate, FirstTurn::Any, |messages| TEMPLATE.render(messages)).unwrap();
        prop_assert!(fitted.ids.len() <= budget);
        prop_assert_eq!(whole.len() <= budget, !fitted.truncation.is_lossy());
        if !fitted.truncation.is_lossy() {
            prop_assert_eq!(&fitted.ids, &whole);
        }
        let Truncation { dropped_messages, dropped_system, truncated_system, token_fallback, .. } = fitted.truncation;
        prop_assert!(dropped_messages < messages.len() && !(dropped_system && truncated_system));
        if token_fallback {
            prop_assert!(whole.ends_with(&fitted.ids));
        }
    }
}
