//! Damaged and hostile GGUF files: a typed error that names file, field, wanted and found, or a sound result; never a panic
//! and never an allocation that the file's own length does not bound.

mod common;

use common::{GgufWriter, Meta, Scratch, assert_refused, tiny_model};
use npuhal_models::gguf::{GgufFile, Value, ValueType};
use npuhal_models::{ModelError, ModelSource};
use proptest::prelude::*;
use std::path::Path;

fn header(writer: &GgufWriter) -> Result<GgufFile, ModelError> {
    header_of(&writer.build())
}

fn header_of(bytes: &[u8]) -> Result<GgufFile, ModelError> {
    GgufFile::open(&Scratch::new(bytes).path)
}

fn le(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn versions_two_and_three_are_read_in_file_order() {
    for version in [2, 3] {
        let mut writer =
            tiny_model("llama").set("x.nested", Meta::Array(9, vec![Meta::ints(&[1, 2]), Meta::texts(&["a"])]));
        writer.version = version;
        let file = header(&writer).unwrap();
        assert_eq!((file.version(), file.alignment()), (version, 32));
        let keys: Vec<_> = file.metadata().map(|(key, _)| key.to_owned()).collect();
        let written: Vec<_> = writer.entries.iter().map(|(key, _)| key.clone()).collect();
        assert_eq!(keys, written);
        let names: Vec<_> = file.tensors().iter().map(|info| info.name().to_owned()).collect();
        let written: Vec<_> = writer.tensors.iter().map(|tensor| tensor.name.clone()).collect();
        assert_eq!(names, written);
        for (info, tensor) in file.tensors().iter().zip(&writer.tensors) {
            assert_eq!(info.dims(), tensor.dims);
            assert_eq!(file.tensor(info).unwrap().bytes(), tensor.data, "{}", tensor.name);
        }
        let nested = file.array("x.nested").unwrap().unwrap();
        assert_eq!((nested.element_type(), nested.len()), (ValueType::Array, 2));
        assert_eq!(nested.to_string(), "[[1, 2], [\"a\"]]");
        assert_eq!(file.get("general.name"), Some(Value::String("tiny")));
        assert_eq!(file.get("absent"), None);
    }
}

#[test]
fn alignment_is_honoured_and_checked() {
    for alignment in [8_u32, 64, 4096] {
        let mut writer = tiny_model("llama").set("general.alignment", Meta::U32(alignment));
        writer.alignment = u64::from(alignment);
        let file = header(&writer).unwrap();
        assert_eq!(file.alignment(), u64::from(alignment));
        assert!(file.data_start().is_multiple_of(alignment as usize));
        assert_eq!(file.tensor(&file.tensors()[0]).unwrap().bytes(), writer.tensors[0].data);
    }
    for alignment in [0_u32, 1, 4, 33, 48, 1 << 21, u32::MAX] {
        let writer = tiny_model("llama").set("general.alignment", Meta::U32(alignment));
        let parts = ["model.gguf", "general.alignment", "wanted a power of two", &format!("found {alignment}")];
        assert_refused("alignment", header(&writer), &parts);
    }
    let text = tiny_model("llama").set("general.alignment", Meta::text("32"));
    assert_refused("alignment", header(&text), &["general.alignment: wanted an integer", "found string \"32\""]);
}

#[test]
fn other_files_are_recognised() {
    let safetensors = [&le(&[60])[..], b"{\"a\":{\"dtype\":\"F32\"}}"].concat();
    for (bytes, what) in [
        (&b""[..], "an empty file"),
        (b"GG", "bytes 47 47"),
        (b"PK\x03\x04rest", "a ZIP archive"),
        (b"<!DOCTYPE html><html>", "an HTML or XML page"),
        (b"\n <html>", "an HTML or XML page"),
        (b"version https://git-lfs.github.com/spec/v1", "a Git LFS pointer"),
        (b"{\"error\":\"no\"}", "JSON text"),
        (b"tjgg\x01\0\0\0", "a GGJT file"),
        (b"FUGG\0\0\0\x03", "byte-swapped"),
        (b"\x80\x02}q", "a Python pickle"),
        (&safetensors, "a safetensors file"),
        (b"\x01\x02\x03\x04\x05", "bytes 01 02 03 04"),
    ] {
        let error = assert_refused(what, header_of(bytes), &["model.gguf: magic: wanted", "found", what]);
        assert!(matches!(error, ModelError::Malformed { .. }));
    }
    assert_refused("cut", header_of(b"GGUF\x03"), &["version: wanted 4 bytes at offset 4, found the end after 1"]);
}

#[test]
fn other_versions_and_byte_orders_are_refused_by_name() {
    for (version, what) in [
        (1_u32, "GGUF version 1 "),
        (4, "GGUF version 4 "),
        (3 << 24, "big-endian GGUF (version 3 byte-swapped)"),
        (0, "GGUF version 0 "),
        (u32::MAX, "GGUF version 4294967295 "),
    ] {
        let mut writer = tiny_model("llama");
        writer.version = version;
        let error = assert_refused(what, header(&writer), &["model.gguf", what, "versions 2 and 3, little-endian"]);
        assert!(matches!(error, ModelError::Unsupported { .. }));
    }
}

#[test]
fn paths_that_are_no_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let empty = assert_refused("folder", ModelSource::open(folder.path()), &["a directory", "supported: a GGUF file"]);
    assert!(!empty.to_string().contains("in the directory"));
    std::fs::write(folder.path().join("b.gguf"), b"").unwrap();
    std::fs::write(folder.path().join("notes.txt"), b"").unwrap();
    assert_refused("folder", ModelSource::open(folder.path()), &["in the directory: b.gguf"]);
    assert_refused("header of a folder", GgufFile::open(folder.path()), &["not a regular file"]);
    let absent = assert_refused("absent", ModelSource::open(&folder.path().join("absent")), &["absent"]);
    assert!(matches!(absent, ModelError::Io { .. }));
    assert!(ModelSource::open(Path::new("/dev/zero")).is_err());
}

#[test]
fn absurd_counts_are_refused_before_anything_is_reserved() {
    for count in [1_u64 << 17 | 1, 1 << 32, 1 << 60, u64::MAX, 100_000] {
        let mut writer = tiny_model("llama");
        writer.tensor_count = Some(count);
        assert_refused("tensors", header(&writer), &["tensor count: wanted at most", &format!("found {count}")]);
        let mut writer = tiny_model("llama");
        writer.entry_count = Some(count);
        assert_refused("entries", header(&writer), &["metadata count: wanted at most", &format!("found {count}")]);
    }
    // One more than there is room for in a header alone.
    let mut writer = GgufWriter::new();
    writer.tensor_count = Some(1);
    assert_refused("tensors", header(&writer), &["tensor count: wanted at most 0"]);
}

#[test]
fn absurd_lengths_in_metadata_are_refused() {
    let with = |type_id: u32, bytes: Vec<u8>| header(&tiny_model("llama").set("x.y", Meta::Raw(type_id, bytes)));
    let array = |element: u32, count: u64| [&element.to_le_bytes()[..], &count.to_le_bytes()].concat();
    for len in [1 << 40, u64::MAX, u64::MAX - 7, 1 << 63] {
        assert_refused("string", with(8, le(&[len])), &["\"x.y\": wanted", &len.to_string(), "found the end"]);
        for element in 0..13 {
            let parts = ["\"x.y\": wanted an array that ends in the file", &format!("found {len} elements")];
            assert_refused("array", with(9, array(element, len)), &parts);
        }
    }
    for type_id in [13, 14, 255, u32::MAX] {
        assert_refused(
            "type",
            with(type_id, Vec::new()),
            &["\"x.y\": wanted a value type", &format!("found {type_id}")],
        );
        assert_refused("element", with(9, array(type_id, 0)), &["\"x.y\": wanted a value type"]);
    }
    assert_refused("bool", with(7, vec![2]), &["\"x.y\": wanted a bool (0 or 1)", "found 2"]);
    assert_refused(
        "bools",
        with(9, [array(7, 3), vec![0, 1, 9]].concat()),
        &["\"x.y\": wanted bools", "found 9 in element 2"],
    );
    let bad_text = [le(&[2]), vec![0xff, 0xfe]].concat();
    assert_refused("text", with(8, bad_text.clone()), &["\"x.y\": wanted UTF-8 text"]);
    assert_refused("texts", with(9, [array(8, 1), bad_text].concat()), &["\"x.y\": element 0: wanted UTF-8 text"]);
    let deep = (0..64).flat_map(|_| array(9, 1)).collect();
    assert_refused("deep", with(9, deep), &["\"x.y\": element 0", "wanted arrays at most 4 deep"]);
}

#[test]
fn keys_are_bounded_and_unique() {
    let long = "k".repeat(65_536);
    let writer = GgufWriter::new().set(&long, Meta::U8(1));
    assert_refused("long", header(&writer), &["key of metadata entry 0: wanted a string of at most 65535 bytes"]);
    let writer = GgufWriter::new().set(&long[1..], Meta::Bool(true));
    assert_eq!(header(&writer).unwrap().metadata().count(), 1);
    let writer = GgufWriter::new().set("", Meta::U8(1));
    assert_refused("empty", header(&writer), &["key of metadata entry 0: wanted a name, found none"]);
    let mut writer = tiny_model("llama");
    writer.entries.push(("general.name".to_owned(), Meta::U8(1)));
    assert_refused("twice", header(&writer), &["\"general.name\": wanted the key once, found it a second time"]);
}

#[test]
fn tensor_infos_are_checked() {
    let name = "blk.0.ffn_up.weight";
    let with = |change: &dyn Fn(&mut common::TensorSpec)| header(&tiny_model("llama").edit(name, change));
    let case = |what: &str, change: &dyn Fn(&mut common::TensorSpec), part: &str| {
        assert_refused(what, with(change), &["model.gguf", name, "wanted", "found", part]);
    };
    case("no dims", &|tensor| tensor.dims.clear(), "1 to 4 dimensions, found 0");
    case("many dims", &|tensor| tensor.dims = vec![1; 5], "1 to 4 dimensions, found 5");
    case("zero", &|tensor| tensor.dims[1] = 0, "dimensions from 1");
    case("overflow", &|tensor| tensor.dims = vec![1 << 32, 1 << 32], "below 2^63");
    case("overflow", &|tensor| tensor.dims = vec![32, u64::MAX / 32], "below 2^63");
    case("absurd", &|tensor| tensor.dims = vec![1 << 31, 1 << 31], "the end of the file at");
    case("one row more", &|tensor| tensor.dims[1] += 1000, "the end of the file at");
    case("part of a block", &|tensor| tensor.dims[0] = 33, "rows of a multiple of 32 elements for Q8_0, found 33");
    case("offset", &|tensor| tensor.offset = Some(1 << 40), "at offset 1099511627776");
    case("offset", &|tensor| tensor.offset = Some(u64::MAX - 31), "at offset 18446744073709551584");
    case("offset", &|tensor| tensor.offset = Some(33), "an offset of a multiple of 32, found 33");
    case("overlap", &|tensor| tensor.offset = Some(0), "data of its own");
    let long = tiny_model("llama").edit(name, |tensor| tensor.name = "n".repeat(65));
    assert_refused(
        "long name",
        header(&long),
        &["tensor 9: name: wanted a string of at most 64 bytes", "found length 65"],
    );
    let twice = tiny_model("llama").ones("output_norm.weight", &[32]);
    assert_refused("twice", header(&twice), &["output_norm.weight", "wanted one tensor of this name, found a second"]);
    let cube = tiny_model("llama").ones("cube", &[32, 1, 1, 1]).ones("real cube", &[8, 2, 2]);
    let file = header(&cube).unwrap();
    let tensor = |name: &str| file.tensor(file.tensor_info(name).unwrap());
    assert_eq!((tensor("cube").unwrap().rows(), tensor("cube").unwrap().cols()), (1, 32));
    assert_refused("cube", tensor("real cube"), &["real cube", "wanted one or two dimensions, found [8, 2, 2]"]);
}

#[test]
fn a_header_of_an_unknown_architecture_can_be_looked_at() {
    let writer = tiny_model("mamba").edit("blk.0.ffn_up.weight", |tensor| tensor.type_id = 16);
    let file = header(&writer).unwrap();
    let info = file.tensor_info("blk.0.ffn_up.weight").unwrap();
    assert_eq!((info.ggml_type().to_string().as_str(), info.range()), ("IQ2_XXS", None));
    assert_eq!(info.elements(), 32 * 64);
    assert_refused("model", file.model(), &["architecture \"mamba\""]);
}

/// A small model's file is cut at every byte of its header and at every tensor's end.
#[test]
fn every_truncation_is_an_error() {
    let writer = tiny_model("qwen2");
    let whole = writer.build();
    let header_len = writer.header().len();
    let data_cuts = (header_len..whole.len()).step_by(97).chain([whole.len() - 1]);
    for len in (0..header_len).chain(data_cuts) {
        let error =
            assert_refused(&format!("cut at {len}"), header_of(&whole[..len]), &["model.gguf", "wanted", "found"]);
        assert!(matches!(error, ModelError::Malformed { .. }), "{error}");
    }
    assert!(header_of(&whole).is_ok());
}

/// Single bits of the whole header: an error or a model whose every tensor can be read.
#[test]
fn every_flipped_bit_is_an_error_or_a_sound_model() {
    let writer = tiny_model("qwen3");
    let whole = writer.build();
    let mut refused = 0;
    let header_bits = writer.header().len() * 8;
    for bit in (0..header_bits).step_by(3) {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        refused += usize::from(!try_everything(&bytes));
    }
    assert!(refused > header_bits / 30, "only {refused} of {header_bits} refused: the check checks nothing");
}

/// Opens the file and touches all there is; false where it is refused.
fn try_everything(bytes: &[u8]) -> bool {
    let scratch = Scratch::new(bytes);
    let file = match GgufFile::open(&scratch.path) {
        Ok(file) => file,
        Err(error) => {
            assert!(error.to_string().contains("model.gguf"));
            return false;
        }
    };
    assert!(
        file.metadata().all(|(key, value)| file.get(key).is_some_and(|found| found.value_type() == value.value_type()))
    );
    file.metadata().for_each(|(_, value)| assert!(value.describe().len() < 2000));
    match file.model() {
        Ok(model) => {
            for (_, tensor) in model.tensors() {
                let mut row = vec![0.0; tensor.cols()];
                (0..tensor.rows()).for_each(|index| tensor.dequantize_row(index, &mut row).unwrap());
            }
            assert!(model.vocabulary().tokens.len() <= model.config().vocab_size);
            assert!(model.vocabulary().eos.iter().all(|&id| (id as usize) < model.config().vocab_size));
            assert!(model.summary().decode_bytes > 0);
            true
        }
        Err(error) => {
            assert!(error.to_string().contains("model.gguf"));
            false
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    /// Several bytes overwritten, preferably with values that make counts and lengths absurd; then perhaps cut or prolonged.
    #[test]
    fn mutated_headers_never_panic(
        arch in prop::sample::select(vec!["llama", "qwen2", "qwen3"]),
        edits in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![Just(0_u8), Just(0xff), Just(0x80), any::<u8>()]), 1..6),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
        extra in 0_usize..64,
    ) {
        let writer = tiny_model(arch);
        let mut bytes = writer.build();
        let header_len = writer.header().len();
        for (at, value) in edits {
            bytes[at.index(header_len)] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        bytes.extend(std::iter::repeat_n(0xaa, extra));
        try_everything(&bytes);
    }

    /// Whole 64-bit fields overwritten with numbers around the borders of integer types.
    #[test]
    fn absurd_numbers_anywhere_never_panic(
        at in any::<prop::sample::Index>(),
        number in prop::sample::select(vec![0, 1, 31, 0xffff, 1 << 31, u64::from(u32::MAX), 1 << 32, i64::MAX as u64, 1 << 63, u64::MAX - 31, u64::MAX]),
    ) {
        let writer = tiny_model("qwen2");
        let mut bytes = writer.build();
        let at = at.index(writer.header().len() - 8);
        bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        try_everything(&bytes);
    }

    /// Bytes of no format at all behind a sound start.
    #[test]
    fn noise_never_panics(noise in prop::collection::vec(any::<u8>(), 0..400), counts in prop::array::uniform2(0_u64..40)) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(le(&counts));
        bytes.extend(noise);
        try_everything(&bytes);
    }
}
