//! A KV cache that forgets what windows have left behind, against one that keeps everything.

use super::*;
use crate::exact::tests::random_model;
use crate::kv::{PAGE_POSITIONS, cache_bytes, rollback};
use npuhal_core::stage::TokenId;
use npuhal_models::config::{LayerAttention, LayerRope};
use proptest::prelude::*;

const POSITIONS: u32 = 4096;
const SEQUENCE: SequenceId = SequenceId(0);

/// A segment of three layers, of which the first and the last see `window` positions; it forgets, or keeps everything.
fn segment(window: usize, forgets: bool) -> FastSegment {
    let seen = |window| LayerAttention { window, rope: LayerRope::Global };
    let window_of = Some(window as u32);
    let (_file, model) = random_model(|spec| {
        spec.config.features.layers = vec![seen(window_of), seen(None), seen(window_of)];
    });
    let mut segment =
        FastSegment::load(&model, SegmentSpan::whole(model.config()), CpuOptions::new(POSITIONS, 2)).unwrap();
    if !forgets {
        segment.cache = KvCache::new(segment.cache.shape(), 3, POSITIONS as usize, 1);
    }
    segment
}

fn rows(from: usize, count: usize, seed: u32) -> Vec<Row> {
    let token = |position: u32| (position.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 7) % 33;
    let positions = from as u32..(from + count) as u32;
    positions.map(|position| Row { sequence: SEQUENCE, token: token(position) as TokenId, position }).collect()
}

fn bits(segment: &mut FastSegment, rows: &[Row]) -> Vec<u32> {
    let mut hidden = HiddenRows::new();
    segment.forward(rows, &mut hidden, Want::All, &Control::new()).unwrap();
    hidden.as_slice().iter().map(|value| value.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 1 } else { 10 }))]

    /// However a sequence grows and is cut back: the same bits, within the memory that is announced.
    #[test]
    fn forgetting_changes_no_bit(
        window in prop::sample::select(vec![1usize, 2, 5, 255, 256, 257, 400]),
        steps in prop::collection::vec((1..=128usize, prop_oneof![3 => Just(0usize), 1 => 1..900usize]), 1..20),
        seed: u32,
    ) {
        let (mut forgets, mut keeps) = (segment(window, true), segment(window, false));
        let (mut len, mut most) = (0, 0);
        for (count, back) in steps {
            let wanted = len - back.min(len);
            let kept = forgets.truncate(SEQUENCE, wanted);
            prop_assert!(kept == wanted || kept == 0 && back > rollback(window), "{kept} of {wanted} after {len}");
            prop_assert_eq!(keeps.truncate(SEQUENCE, kept), kept);
            let rows = rows(kept, count, seed ^ back as u32);
            prop_assert_eq!(bits(&mut forgets, &rows), bits(&mut keeps, &rows), "{} rows from {}", count, kept);
            len = kept + count;
            most = most.max(len);
            let allocated = forgets.cache.allocated_bytes() as u64;
            let announced = cache_bytes(&forgets.config, 0..3, most);
            prop_assert!(allocated <= announced, "{allocated} of {announced} bytes at {most}");
        }
    }
}

#[test]
fn a_layer_with_a_window_takes_no_more_memory_once_the_window_is_full() {
    let mut segment = segment(300, true);
    let mut page_counts = Vec::new();
    let page_bytes = 2 * segment.cache.shape().page_len();
    for from in (0..3840).step_by(128) {
        bits(&mut segment, &rows(from, 128, 1));
        page_counts.push(segment.cache.allocated_bytes() / page_bytes);
    }
    let full_layer = 3840 / PAGE_POSITIONS;
    assert_eq!(page_counts.last(), Some(&(full_layer + 2 * 4)));
    let windowed = |index: usize| page_counts[index] - (128 * (index + 1)).div_ceil(PAGE_POSITIONS);
    assert_eq!(windowed(10), windowed(29), "{page_counts:?}");
}

#[test]
fn a_sequence_cut_back_too_far_is_begun_anew() {
    let (mut segment, mut fresh) = (segment(300, true), segment(300, true));
    for from in (0..1920).step_by(128) {
        bits(&mut segment, &rows(from, 128, 1));
    }
    assert_eq!(segment.truncate(SEQUENCE, 1920 - rollback(300)), 1920 - rollback(300), "as far as is promised");
    assert_eq!(segment.truncate(SEQUENCE, 700), 0);
    assert!(matches!(
        segment.forward(&rows(700, 1, 1), &mut HiddenRows::new(), Want::All, &Control::new()),
        Err(RunError::BadRows { .. })
    ));
    for from in (0..768).step_by(128) {
        assert_eq!(bits(&mut segment, &rows(from, 128, 2)), bits(&mut fresh, &rows(from, 128, 2)), "from {from}");
    }
}
