// Loads a program that `farm fetch` wrote, runs it once and prints what came out:
//
//   run_migraphx model/net--migraphx-cpu--fp32--b8.mxr
//
// For a program with `offload_copy: true` (the farm's default): it takes memory of the host and copies it itself.

#include <algorithm>
#include <cstddef>
#include <iostream>
#include <list>
#include <vector>

#include <migraphx/migraphx.hpp>

int main(int argc, char** argv)
{
    if(argc != 2)
    {
        std::cerr << "usage: " << argv[0] << " PROGRAM\n";
        return 2;
    }
    migraphx::program program = migraphx::load(argv[1]);
    auto shapes               = program.get_parameter_shapes();

    migraphx::program_parameters inputs;
    std::list<std::vector<char>> memory; // has to outlive the arguments
    for(const char* name : shapes.names())
    {
        auto shape   = shapes[name];
        auto& buffer = memory.emplace_back(shape.bytes());
        if(shape.type() == migraphx_shape_float_type)
        {
            auto* values = reinterpret_cast<float*>(buffer.data());
            std::fill(values, values + shape.elements(), 0.5f);
        }
        inputs.add(name, migraphx::argument(shape, buffer.data()));
        std::cout << "input " << name << ": " << shape.elements() << " values\n";
    }

    auto outputs = program.eval(inputs);
    for(std::size_t i = 0; i < outputs.size(); i++)
    {
        auto shape = outputs[i].get_shape();
        std::cout << "output " << i << ": " << shape.elements() << " values";
        if(shape.type() == migraphx_shape_float_type)
        {
            double sum = 0;
            for(float value : outputs[i].as_vector<float>())
                sum += value;
            std::cout << ", sum " << sum;
        }
        std::cout << "\n";
    }
}
