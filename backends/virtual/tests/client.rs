//! The client of the driver crate on the virtual NPU, through level 1.

mod common;

use common::{
    Bench, COPY_WORDS, SCALE_ELEMENTS, buffers, combinations, copy_kit, patience, pattern, read_words, scale_kit,
    submit,
};

#[test]
fn single_runs_give_the_right_answer_everywhere() {
    for (spec, flow) in combinations() {
        let bench = Bench::new(&spec);
        let what = format!("{spec} {flow:?}");

        let input = pattern(COPY_WORDS, 5);
        let (source, target) = (bench.buffer(&input).unwrap(), bench.empty(COPY_WORDS).unwrap());
        let (mut context, kernel) = bench.load(&copy_kit(spec.silicon, flow), flow).unwrap();
        let mut list = context.runlist();
        list.push(&*kernel, &buffers(&[&source, &target])).unwrap();
        let completion =
            submit(&mut *list).unwrap_or_else(|error| panic!("{what}: {error}: {:#?}", bench.hardware.diagnoses()));
        assert_eq!(completion.runs, 1);
        assert!(completion.device_time.is_some(), "{what}");
        assert_eq!(read_words(&target).unwrap(), input, "{what}");
        drop((list, kernel, context));

        let input = pattern(SCALE_ELEMENTS, 9);
        let (vector, result) = (bench.buffer(&input).unwrap(), bench.empty(SCALE_ELEMENTS).unwrap());
        let factor = bench.buffer(&[7]).unwrap();
        let (mut context, kernel) = bench.load(&scale_kit(spec.silicon, flow), flow).unwrap();
        let mut list = context.runlist();
        list.push(&*kernel, &buffers(&[&vector, &factor, &result])).unwrap();
        for factor_value in [7_u32, 11] {
            factor.write(0, &factor_value.to_le_bytes()).unwrap();
            submit(&mut *list).unwrap();
            let wanted: Vec<u32> = input.iter().map(|x| x.wrapping_mul(factor_value)).collect();
            assert_eq!(read_words(&result).unwrap(), wanted, "{what}");
        }
        bench.assert_clean(&what);
        let _ = patience();
    }
}
