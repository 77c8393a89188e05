//! Hostile model directories and split files: an error of one bounded line, or a model; no panic, within bounded time.

use npuhal_models::{
    ChatInput, ChatMessage, ChatTemplate, ControlTokens, ModelSource, Specials, Tokenizer, WeightType,
};
use npuhal_tests::kit::gguf::GgufFile;
use npuhal_tests::kit::hub::{HubDirectory, safetensors};
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Characters of a message: what a file says in it is cut.
const LONGEST_MESSAGE: usize = 2000;

static GOOD: LazyLock<HubDirectory> =
    LazyLock::new(|| HubDirectory::new(&ModelSpec::small(Architecture::Llama, Weights::Uniform(WeightType::F32))));

/// Opens the model at `path` and uses what there is of its text; an error has one bounded line, and all of it takes seconds.
fn try_everything(path: &Path) -> Result<(), String> {
    let start = Instant::now();
    let result = ModelSource::open(path).map_err(|error| error.to_string()).and_then(|model| {
        for (_, tensor) in model.tensors() {
            let mut row = vec![0.0; tensor.cols()];
            tensor.dequantize_row(tensor.rows() - 1, &mut row).map_err(|error| error.to_string())?;
        }
        let input = ChatInput::new(vec![ChatMessage::new("user", "hello <s> the 🙂")]);
        let rendered = ChatTemplate::from_vocabulary(model.vocabulary()).and_then(|template| template.render(&input));
        // The template is the model's own words: its errors may show a line of it below.
        if let Err(error) = rendered {
            assert!(error.to_string().chars().count() < LONGEST_MESSAGE, "{error}");
        }
        let tokenizer = Tokenizer::from_vocabulary(model.vocabulary()).map_err(|error| error.to_string())?;
        let ids = tokenizer.encode("hello <|im_end|> é\n", Specials::Plain).map_err(|error| error.to_string())?;
        assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()));
        drop(tokenizer.decode(&ids, ControlTokens::Show));
        Ok(())
    });
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    if let Err(error) = &result {
        let len = error.chars().count();
        assert!(
            error.lines().count() == 1 && len < LONGEST_MESSAGE,
            "{len} characters: {}",
            &error[..error.len().min(3000)]
        );
    }
    result
}

/// The files of a sound directory, changed by `edit`.
fn with(shards: usize, edit: impl FnOnce(&Path)) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    GOOD.write(folder.path(), shards).unwrap();
    edit(folder.path());
    try_everything(folder.path())
}

/// Weights with `header` in place of their own, which has the sound one's data behind it.
fn with_header(header: &[u8], data: &[u8]) -> Result<(), String> {
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header, data].concat();
    with(1, |folder| std::fs::write(folder.join(WEIGHTS), bytes).unwrap())
}

/// Header and data of the sound weights.
fn parts() -> (Map<String, Value>, Vec<u8>) {
    let bytes = safetensors(&GOOD.tensors);
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..8 + len]).unwrap(), bytes[8 + len..].to_vec())
}

#[track_caller]
fn refused(result: Result<(), String>, wanted: &[&str]) {
    let error = result.unwrap_err();
    assert!(wanted.iter().all(|wanted| error.contains(wanted)), "wanted {wanted:?}, found {error}");
}

#[test]
fn weights_that_contradict_themselves_are_refused() {
    assert_eq!(with(1, |_| ()), Ok(()));
    let (header, data) = parts();
    let name = "model.norm.weight";
    let edited = |key: &str, value: Value| {
        let mut header = header.clone();
        header[name][key] = value;
        with_header(Value::Object(header).to_string().as_bytes(), &data)
    };
    let offsets = |from: u64, to: u64| edited("data_offsets", json!([from, to]));
    refused(offsets(u64::MAX, u64::MAX), &[name, "wanted offsets inside"]);
    refused(offsets(10, 0), &[name, "wanted offsets inside"]);
    refused(offsets(0, 144), &["overlaps the tensor before it"]);
    refused(edited("data_offsets", json!([0])), &["header", "invalid length 1"]);
    refused(edited("data_offsets", json!([-1, 3])), &["header"]);
    refused(edited("shape", json!([1u64 << 63, 8])), &[name, "wanted the bytes of"]);
    refused(edited("shape", json!(vec![1; 100_000])), &[name, "wanted the bytes of [1, 1", "…"]);
    refused(edited("shape", json!([])), &[name, "wanted the bytes of"]);
    refused(edited("shape", json!("many")), &["header", "wanted a JSON object of tensors"]);
    refused(edited("dtype", json!("F12")), &[name, "unknown element type \"F12\""]);
    refused(edited("dtype", json!("x".repeat(1 << 20))), &[name, "unknown element type", "…"]);
    refused(edited("dtype", json!("I32")), &["element type I32", name]);
    let without = |name: &str| {
        let mut header = header.clone();
        header.remove(name);
        with_header(Value::Object(header).to_string().as_bytes(), &data)
    };
    refused(without(name), &["wanted"]);
    let long = "n".repeat(1 << 20);
    let mut renamed = header.clone();
    let entry = renamed.remove(name).unwrap();
    renamed.insert(format!("{long}\n"), entry);
    refused(with_header(Value::Object(renamed).to_string().as_bytes(), &data), &["nnn…", "not supported"]);

    // The text of the header itself.
    refused(with_header(b"", &data), &["header"]);
    refused(with_header(b"[]", &data), &["wanted a JSON object of tensors"]);
    refused(with_header(b"{}", &data), &["wanted tensors up to the end of the file"]);
    refused(with_header(b"{\"a\":", &data), &["header", "EOF"]);
    refused(with_header(&b"{\"a\":".repeat(50_000), &data), &["header"]);
    refused(with_header(&b"[".repeat(1 << 20), &data), &["header"]);
    refused(with_header(&[0xff; 64], &data), &["header"]);
    let twice = Value::Object(header.clone()).to_string();
    let entry = header[name].to_string();
    let twice = format!("{{\"{name}\":{entry},{}", &twice[1..]);
    refused(with_header(twice.as_bytes(), &data), &[name, "found a second"]);
    for len in [u64::MAX, 1 << 40, 100_000_001, 1 << 20] {
        let bytes = [&len.to_le_bytes()[..], b"{}"].concat();
        let cut = with(1, |folder| std::fs::write(folder.join(WEIGHTS), bytes).unwrap());
        refused(cut, &["header length", &format!("found {len}")]);
    }
    for len in 0..8 {
        let cut = with(1, |folder| std::fs::write(folder.join(WEIGHTS), &[1u8; 8][..len]).unwrap());
        refused(cut, &[WEIGHTS]);
    }
}

#[test]
fn links_out_of_the_directory_and_things_that_are_no_files_are_refused() {
    let mapped = |file: &str| {
        let index = json!({ "weight_map": { "model.norm.weight": file } }).to_string();
        with(2, |folder| std::fs::write(folder.join(INDEX), index).unwrap())
    };
    for outside in ["/etc/passwd", "../x.safetensors", "a/b", "..", ".", "", "a\\b", "a\u{0}b", "a\nb"] {
        refused(mapped(outside), &["weight_map", "wanted plain file names"]);
    }
    refused(mapped(&"x".repeat(1 << 20)), &["wanted plain file names", "x…"]);
    let many: Map<String, Value> = (0..5000).map(|n| (format!("t{n}"), json!(format!("{n}.safetensors")))).collect();
    let index = json!({ "weight_map": many }).to_string();
    refused(
        with(2, |folder| std::fs::write(folder.join(INDEX), index).unwrap()),
        &["wanted at most 4096 files, found 5000"],
    );
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", WEIGHTS, INDEX] {
        for is_folder in [true, false] {
            let shards = if file == INDEX { 2 } else { 1 };
            let result = with(shards, |folder| {
                let path = folder.join(file);
                // The sound one is not there for some.
                let _ = std::fs::remove_file(&path);
                match is_folder {
                    true => std::fs::create_dir(&path).unwrap(),
                    // Whoever opens a pipe waits for its writer.
                    false => {
                        let made = std::process::Command::new("mkfifo").arg(&path).status();
                        if !made.is_ok_and(|status| status.success()) {
                            std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
                        }
                    }
                }
            });
            assert!(result.is_err(), "{file}, folder: {is_folder}");
        }
    }
}

/// A JSON value in the place of another.
fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        Just(json!(0)),
        Just(json!(-1)),
        Just(json!(1e300)),
        Just(json!(u64::MAX)),
        any::<u32>().prop_map(Value::from),
        (0..300u32).prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        Just(json!("x\n".repeat(5000))),
        Just(json!("<|im_end|>")),
        Just(json!("{% for m in messages %}{{ m.content }}{% endfor %}")),
        Just(json!("{{ raise_exception('no') }}")),
        Just(json!("{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}")),
        Just(json!("model-00001-of-00002.safetensors")),
    ];
    leaf.prop_recursive(3, 24, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::btree_map("[a-z_0-9]{1,12}", inner.clone(), 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
            (inner.clone(), any::<bool>())
                .prop_map(|(content, special)| json!({ "content": content, "special": special })),
            (inner.clone(), inner).prop_map(|(name, template)| json!([{ "name": name, "template": template }])),
        ]
    })
}

/// A file beside the weights and one of the keys that are read of it.
fn places() -> impl Strategy<Value = (&'static str, &'static str)> {
    let config = "tokenizer_config.json";
    prop::sample::select(vec![
        (config, "added_tokens_decoder"),
        (config, "additional_special_tokens"),
        (config, "extra_special_tokens"),
        (config, "bos_token"),
        (config, "eos_token"),
        (config, "pad_token"),
        (config, "unk_token"),
        (config, "add_bos_token"),
        (config, "chat_template"),
        ("special_tokens_map.json", "bos_token"),
        ("special_tokens_map.json", "additional_special_tokens"),
        ("added_tokens.json", "<|im_end|>"),
        ("added_tokens.json", "<more>"),
        ("chat_template.json", "chat_template"),
        ("generation_config.json", "eos_token_id"),
        ("generation_config.json", "do_sample"),
        ("generation_config.json", "top_k"),
        ("generation_config.json", "bad_words_ids"),
        (INDEX, "weight_map"),
        (INDEX, "metadata"),
    ])
}

/// All paths into a JSON value.
fn pointers(value: &Value, path: String, all: &mut Vec<String>) {
    let escaped = |key: &str| key.replace('~', "~0").replace('/', "~1");
    match value {
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(n, item)| pointers(item, format!("{path}/{n}"), all));
        }
        Value::Object(map) => {
            map.iter().for_each(|(key, item)| pointers(item, format!("{path}/{}", escaped(key)), all))
        }
        _ => {}
    }
    all.push(path);
}

/// `value` with other values at some places.
fn replaced(mut value: Value, edits: Vec<(prop::sample::Index, Value)>) -> Value {
    for (place, with) in edits {
        let mut all = Vec::new();
        pointers(&value, String::new(), &mut all);
        if let Some(slot) = value.pointer_mut(&all[place.index(all.len())]) {
            *slot = with;
        }
    }
    value
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, failure_persistence: None, ..ProptestConfig::default() })]

    /// The header of the weights, with anything in the place of anything.
    #[test]
    fn hostile_headers_of_weights(
        edits in prop::collection::vec((any::<prop::sample::Index>(), values()), 1..4),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let (header, mut data) = parts();
        let header = replaced(Value::Object(header), edits).to_string();
        if let Some(cut) = cut {
            data.truncate(cut.index(data.len()));
        }
        let _ = with_header(header.as_bytes(), &data);
    }

    /// The small files beside the weights and the index of these, one key of them or any place in it.
    #[test]
    fn hostile_side_files(
        edits in prop::collection::vec((places(), values()), 1..4),
        index_edits in prop::collection::vec((any::<prop::sample::Index>(), values()), 0..3),
    ) {
        let _ = with(2, |folder| {
            let write = |file: &str, edit: &dyn Fn(&mut Value)| {
                let path = folder.join(file);
                let mut value = std::fs::read(&path).map_or_else(|_| json!({}), |bytes| serde_json::from_slice(&bytes).unwrap());
                edit(&mut value);
                std::fs::write(path, value.to_string()).unwrap();
            };
            for ((file, key), value) in edits {
                write(file, &|object| object[key] = value.clone());
            }
            write(INDEX, &|index| *index = replaced(index.clone(), index_edits.clone()));
        });
    }

    /// Damaged bytes in any small file, and files of no format at all.
    #[test]
    fn damaged_side_files(
        file in prop::sample::select(vec![
            "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json", "chat_template.jinja", INDEX,
        ]),
        noise in prop::collection::vec(any::<u8>(), 0..60),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let _ = with(2, |folder| {
            let path = folder.join(file);
            let mut bytes = std::fs::read(&path).unwrap_or(noise);
            for (index, byte) in edits {
                if !bytes.is_empty() {
                    let at = index.index(bytes.len());
                    bytes[at] = byte;
                }
            }
            std::fs::write(path, bytes).unwrap();
        });
    }

    /// Any byte of the header of any part of a split file, parts in the place of others, parts cut short.
    #[test]
    fn hostile_parts_of_split_files(
        edits in prop::collection::vec((0..3usize, any::<prop::sample::Index>(), prop_oneof![Just(0u8), Just(0xff), any::<u8>()]), 0..5),
        swapped in prop::option::weighted(0.3, (0..3usize, 0..3usize)),
        cut in prop::option::weighted(0.3, (0..3usize, any::<prop::sample::Index>())),
        missing in prop::option::weighted(0.1, 0..3usize),
        opened in 0..3usize,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = |part: usize| folder.path().join(format!("m-{:05}-of-00003.gguf", part + 1));
        let mut files: Vec<Vec<u8>> = SPLIT.iter().map(GgufFile::to_bytes).collect();
        for (part, place, byte) in edits {
            // Names, counts, types and offsets lie in front.
            let reach = files[part].len().min(3000);
            files[part][place.index(reach)] = byte;
        }
        if let Some((one, other)) = swapped {
            files.swap(one, other);
        }
        if let Some((part, place)) = cut {
            let len = place.index(files[part].len());
            files[part].truncate(len);
        }
        for (part, bytes) in files.iter().enumerate().filter(|(part, _)| Some(*part) != missing) {
            std::fs::write(path(part), bytes).unwrap();
        }
        let _ = try_everything(&path(opened));
    }
}

static SPLIT: LazyLock<Vec<GgufFile>> =
    LazyLock::new(|| ModelSpec::small(Architecture::Qwen3, Weights::Uniform(WeightType::F16)).build().split(3));
